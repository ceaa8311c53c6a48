"""Another process that takes memory of the card when told to."""

from __future__ import annotations

import subprocess
import sys

MIB = 2**20

_CODE = """
import sys, threading, time, torch
held, pressing = [], threading.Event()

def leave(nbytes):
    while True:
        take = (torch.cuda.mem_get_info()[0] - nbytes) // 2**21 * 2**21
        if take < 12 * 2**20:
            return
        try:
            held.append(torch.empty(take, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            time.sleep(0.001)

def press(nbytes):
    while pressing.is_set():
        leave(nbytes)
        time.sleep(0.001)

torch.zeros(1, device="cuda")
thread = None
for line in sys.stdin:
    word, nbytes = line.split()
    if word == "free":
        pressing.clear()
        if thread is not None:
            thread.join()
        held.clear()
        torch.cuda.empty_cache()
    else:
        leave(int(nbytes))
        if word == "press":
            pressing.set()
            thread = threading.Thread(target=press, args=(int(nbytes),))
            thread.start()
    print("done", flush=True)
"""


class MemoryHog:
    """Use as a context manager. Calls return when the memory is taken, or given back."""

    def __enter__(self) -> MemoryHog:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
        self._process.stdin.close()
        self._process.wait(20)

    def leave(self, nbytes: int) -> None:
        """Take all that is free now but about so much."""
        self._say("leave", nbytes)

    def press(self, nbytes: int) -> None:
        """As `leave`, again and again, until `free`."""
        self._say("press", nbytes)

    def free(self) -> None:
        self._say("free", 0)

    def _say(self, word: str, nbytes: int) -> None:
        self._process.stdin.write(f"{word} {nbytes}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

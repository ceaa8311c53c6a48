"""The alarm on real memory: what is free is read, not imagined; a margin above it, or a process that takes it, rings."""

from __future__ import annotations

import subprocess
import sys

import psutil
import torch

from wanfit.memory.alarm import RAM_MARGIN, VRAM_MARGIN, Alarm, Margins
from wanfit.memory.device import RESERVE_BYTES
from wanfit.memory.host import HostRoom, available_bytes

CPU = torch.device("cpu")
MIB = 2**20
HOLD = """import sys
held = []
for _ in sys.stdin:
    held.append(bytearray(b"x") * (256 << 20))
    print(len(held), flush=True)
"""


def test_it_is_quiet_on_a_machine_with_room_and_for_a_run_that_keeps_to_its_plan():
    alarm = Alarm(CPU)
    assert alarm.margins.ram <= RAM_MARGIN
    if available_bytes() > 2 * alarm.margins.ram:
        assert alarm.check() == ()
    assert VRAM_MARGIN < RESERVE_BYTES


def test_another_process_that_takes_memory_rings_it():
    """The margin lies 256 MiB below what is free; the other process takes 256 MiB at a time until it rings.

    Two pieces are enough on a quiet machine; tests that run beside this one may free some meanwhile.
    """
    alarm = Alarm(CPU, Margins(0, available_bytes() - 256 * MIB), interval_s=0)
    assert alarm.check() == ()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        for _ in range(16):
            other.stdin.write(b"more\n")
            other.stdin.flush()
            other.stdout.readline()
            rung = alarm.check()
            if rung:
                break
        other.stdin.close()
    (shortage,) = rung
    assert shortage.kind == "RAM" and shortage.free < shortage.margin and not shortage.urgent
    assert "GiB of RAM are free" in str(shortage)


def test_below_a_quarter_of_the_margin_it_is_urgent():
    (shortage,) = Alarm(CPU, Margins(0, 2**50)).check()
    assert shortage.urgent and abs(shortage.free - psutil.virtual_memory().available) < 2**30


def test_it_looks_no_more_often_than_it_was_told_and_costs_little():
    now = [0.0]
    alarm = Alarm(CPU, Margins(0, 2**50), interval_s=0.05, clock=lambda: now[0])
    assert alarm.check()
    now[0] = 0.04
    assert alarm.check() == ()
    now[0] = 0.06
    assert alarm.check()


def test_a_container_s_limit_counts():
    room = HostRoom()
    assert 0 < room.available() <= room.installed <= psutil.virtual_memory().total
    assert abs(room.available() - available_bytes()) < 2**30

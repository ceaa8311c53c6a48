"""How a MODEL's blocks are placed; travels with the MODEL as an attachment of its patcher."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "resident", "stream", "native")


@dataclass(frozen=True)
class Policy:
    """What the user asked for.

    Args:
        mode: auto: as many blocks stay on the device as the budget allows, the rest is streamed; resident: all
            of them; stream: none.
        vram_bytes: for weights and activations while sampling; 0: what is free.
        ram_bytes: for host copies of blocks; 0: what is free. Memory-mapped files do not count.
        attention: comfyui: ComfyUI's function; auto: that one where a start option or another node chose it, else
            the engine's fastest; or another name of the engine's `ATTENTION`.
        fp8_matmul: multiply fp8 weights in fp8 on cards that can.
    """

    mode: str = "auto"
    vram_bytes: int = 0
    ram_bytes: int = 0
    attention: str = "auto"
    fp8_matmul: bool = True

"""One tiny text encoder, written in every layout once for the whole folder."""

from pathlib import Path

import pytest
import torch

from wanfit.tiny import text as tiny


@pytest.fixture(scope="session")
def tiny_text() -> tiny.TinyText:
    return tiny.make_text()


@pytest.fixture(scope="session")
def layouts(tiny_text: tiny.TinyText, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def folder() -> Path:
        return tmp_path_factory.mktemp("text")

    return {
        "comfy-fp16": tiny.write_comfy(tiny_text, folder()),
        "comfy-bf16": tiny.write_comfy(tiny_text, folder(), torch.bfloat16),
        "comfy-fp8-scaled": tiny.write_comfy_fp8_scaled(tiny_text, folder()),
        "kijai-bf16": tiny.write_kijai(tiny_text, folder()),
        "kijai-fp8": tiny.write_kijai(tiny_text, folder(), fp8=True),
        "diffusers": tiny.write_diffusers(tiny_text, folder()),
        "gguf-q8_0": tiny.write_gguf(tiny_text, folder()),
        "gguf-q5_1": tiny.write_gguf(tiny_text, folder(), "Q5_1"),
    }

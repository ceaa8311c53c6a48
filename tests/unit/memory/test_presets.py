"""Presets weigh what the published files weigh (formats.md, section 4: manifests and byte-exact layout models)."""

import pytest

from wanfit.checkpoint import open_checkpoint
from wanfit.errors import InputError
from wanfit.memory.parts import text_part, transformer_part, vae_part
from wanfit.memory.presets import file_types, text_preset, transformer_preset, vae_preset
from wanfit.offload.layout import BlockFile
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.layouts import write_comfy_scaled, write_kijai_scaled, write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae

PUBLISHED = {
    "t2v-a14b:fp8": 14_293_923_632,
    "i2v-a14b:fp8": 14_294_742_832,
    "i2v-a14b:fp16": 28_577_914_792,
    "t2v-a14b:fp16": 28_577_095_592,
    "t2v-a14b:fp8_kj": 15_001_361_458,
    "t2v-1.3b:fp16": 2_838_303_560,
    "ti2v-5b:fp16": 9_999_658_848,
    "i2v-a14b:q8_0": 15_406_608_896,
    "i2v-a14b:q6_k": 12_003_652_096,
    "i2v-a14b:q5_k_m": 10_792_055_296,
    "i2v-a14b:q4_k_m": 9_651_728_896,
    "t2v-a14b:q4_k_s": 8_746_512_896,
    "t2v-a14b:q3_k_m": 7_174_468_096,
    "t2v-a14b:q2_k": 5_299_319_296,
    "ti2v-5b:q8_0": 5_400_179_040,
    "ti2v-5b:q4_k_m": 3_433_116_000,
}


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_a_preset_weighs_what_its_file_weighs(name, size):
    # The file has a header, scales and padding besides.
    nbytes = transformer_preset(name).nbytes
    assert 0 < size - nbytes < 320_000


def test_the_other_parts_weigh_what_their_files_weigh():
    assert 0 < 6_735_906_897 - text_preset("fp8").nbytes - 4_548_313 < 60_000  # the file carries the tokenizer
    assert 0 < 253_815_318 - vae_preset("vae-2.1").nbytes < 40_000
    assert 0 < 1_409_400_960 - vae_preset("vae-2.2").nbytes < 40_000


def test_one_block_of_a14b_in_fp8_and_its_rest():
    part = transformer_preset("i2v-a14b:fp8")
    assert part.num_layers == 40 and part.dim == 5120 and part.num_heads == 40
    assert abs(part.block_bytes / 2**30 - 0.327) < 0.001  # formats.md 6.1
    assert part.rest_elements + 40 * 351_394_304 == 14_288_901_184


@pytest.mark.parametrize("name", ["wan:fp8", "i2v-a14b", "i2v-a14b:q9_k", "", "i2v-a14b:fp8:x"])
def test_an_unknown_preset_lists_the_known_ones(name):
    with pytest.raises(InputError) as caught:
        transformer_preset(name)
    assert caught.value.code == "number_invalid"
    assert ("i2v-a14b" in caught.value.change) or ("q4_k_m" in caught.value.change)


def test_every_type_of_every_variant_has_a_size():
    for kind in file_types():
        assert transformer_preset(f"ti2v-5b:{kind}").block_bytes > 0


@pytest.mark.parametrize("layout", ["fp8", "fp8_kj", "fp16", "q8_0", "q4_k_m"])
def test_a_file_gives_the_numbers_that_the_weight_path_uses(tmp_path, layout):
    weights = tiny_transformer("i2v-a14b")
    path = tmp_path / ("wan2.2_i2v_high_noise." + ("gguf" if layout.startswith("q") else "safetensors"))
    if layout == "fp8":
        write_comfy_scaled(path, weights)
    elif layout == "fp8_kj":
        write_kijai_scaled(path, weights)
    elif layout == "fp16":
        write_plain(path, weights)
    else:
        write_gguf(path, weights, layout.upper())
    with open_checkpoint(path) as checkpoint:
        part = transformer_part(checkpoint)
        exact = BlockFile(checkpoint).largest
    assert exact <= part.block_bytes <= exact + 20 * 512  # two scales are counted where a file has one
    assert part.variant == "i2v-a14b" and part.in_channels == 36 and part.num_layers == 2


def test_vae_and_text_parts_of_files(tmp_path):
    with open_checkpoint(write_plain(tmp_path / "wan_2.1_vae.safetensors", tiny_vae())) as checkpoint:
        part = vae_part(checkpoint)
        assert part.elements == checkpoint.identity.parameters
    from wanfit.tiny.text import make_text, write_comfy_fp8_scaled

    with open_checkpoint(write_comfy_fp8_scaled(make_text(seed=1), tmp_path)) as checkpoint:
        text = text_part(checkpoint)
    assert text.nbytes > text.largest > 0 and text.num_heads > 0

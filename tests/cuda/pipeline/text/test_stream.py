"""The text encoder streamed to a CUDA card: the CPU's embeddings, in the memory of one linear."""

import pytest
import torch

from wanfit.checkpoint import open_checkpoint
from wanfit.pipeline.text import encode_prompts, load_text_encoder, load_tokenizer
from wanfit.tiny import text as tiny

PROMPTS = ["a cat walks slowly on the grass, then it floats gently over a calm sea.", "一只猫"]

if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)


@pytest.mark.parametrize("layout", ["fp8-scaled", "q8_0"])
def test_stream_equals_cpu(tmp_path, layout):
    """Tolerance in float32: 1e-4 of the largest value; other kernels sum in another order, without TF32."""
    text = tiny.make_text(tiny.TinyShape(d_ff=512, num_layers=6))
    path = tiny.write_gguf(text, tmp_path) if layout == "q8_0" else tiny.write_comfy_fp8_scaled(text, tmp_path)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        on_cpu = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32)
        reference = encode_prompts(on_cpu, tokenizer, PROMPTS)
        before = torch.cuda.memory_allocated()
        encoder = load_text_encoder(checkpoint, device="cuda", compute_dtype=torch.float32, placement="stream")
        assert torch.cuda.memory_allocated() == before
        torch.cuda.reset_peak_memory_stats()
        result = encode_prompts(encoder, tokenizer, PROMPTS)
        assert result.device.type == "cuda"
        error = (result.cpu() - reference).abs().max() / reference.abs().max()
        assert error.item() <= 1e-4
        # 42 linears went through the card; what is left there is the result and the library's workspace.
        workspace = 64 * 2**20
        assert torch.cuda.memory_allocated() - before - result.nbytes < workspace
        largest = text.shape.d_ff * text.shape.d_model * 4
        assert torch.cuda.max_memory_allocated() - before < result.nbytes + 4 * largest + workspace
        encoder.release()


def test_cpu_placement_hands_the_result_to_the_card(tmp_path):
    text = tiny.make_text(tiny.TinyShape(d_model=256))
    with open_checkpoint(tiny.write_comfy(text, tmp_path)) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cuda", compute_dtype=torch.bfloat16, placement="cpu")
        result = encode_prompts(encoder, load_tokenizer(checkpoint), PROMPTS)
    assert (result.device.type, result.dtype) == ("cuda", torch.bfloat16)
    assert all(p.device.type == "cpu" for p in encoder.module.parameters())

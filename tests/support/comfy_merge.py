"""Run by a ComfyUI's own Python, in its tree: merge LoRA files into a model by ComfyUI's own loader and patcher.

python comfy_merge.py CASES.json      [[model, lora, strength, result], ...]
"""

import json
import sys
from pathlib import Path

cases = json.loads(Path(sys.argv.pop()).read_text(encoding="utf-8"))
sys.argv.append("--cpu")
sys.path.insert(0, ".")

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.lora  # noqa: E402
import comfy.lora_convert  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

for model, lora, strength, result in cases:
    patcher = comfy.sd.load_diffusion_model(model, model_options={"dtype": torch.float32})
    tensors = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(lora, safe_load=True))
    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    patches = comfy.lora.load_lora(tensors, keys)
    taken = patcher.add_patches(patches, strength)
    print(len(patches), "patches,", len(taken), "taken")
    patcher.patch_model(device_to=torch.device("cpu"))
    merged = {
        name.removeprefix("diffusion_model."): tensor.detach().float().contiguous().clone()
        for name, tensor in patcher.model.state_dict().items()
        if name.startswith("diffusion_model.")
    }
    save_file(merged, result)

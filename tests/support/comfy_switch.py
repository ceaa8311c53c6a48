"""Run by a ComfyUI's own Python, in its tree: what is held when the sampler goes from one expert to the other.

python comfy_switch.py PACK FOLDER

FOLDER holds high.safetensors and low.safetensors. Blocks live in the engine's store, as on a card.
Prints one JSON line: `seen`, what is held when an expert is about to run; `entered`, the expert of each block that ran;
`released`, whose LoRAs were given back, one after the other; `kept`, whether the MODELs' weights are still there
once nothing refers to them any more, and the bytes that they then hold.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import weakref
from pathlib import Path

pack, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv = [sys.argv[0], "--cpu"]
sys.path.insert(0, ".")

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management as management  # noqa: E402
import folder_paths  # noqa: E402
import torch  # noqa: E402
import utils.install_util  # noqa: E402, F401 - before anything else is imported under that name, as main.py does

folder_paths.add_model_folder_path("diffusion_models", str(folder))
spec = importlib.util.spec_from_file_location(
    "wanfit_pack", pack / "__init__.py", submodule_search_locations=[str(pack)]
)
module = importlib.util.module_from_spec(spec)
sys.modules["wanfit_pack"] = module
spec.loader.exec_module(module)
from wanfit_pack.nodes._comfy import load, patches, sampler  # noqa: E402
from wanfit_pack.nodes._comfy.placement import RING, Placement  # noqa: E402
from wanfit_pack.src.wanfit.offload import BlockStore, PatchStore  # noqa: E402

seen, loras, released = [], [], []


class KeptPatches(PatchStore):
    """As on a card under the policy resident."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._kept = {}
        loras.append(self)

    def release_device(self) -> None:
        if self.device_bytes:
            released.append(loras.index(self))
        super().release_device()


def source(self: Placement, expert: int, device: torch.device, policy: object, weight_budget: int) -> object:
    """As on a card; asked when an expert is about to run its first forward."""
    held = 0 if self._store is None else self._store.report.device_bytes
    seen.append({
        "expert": expert,
        "blocks": held,
        "loras": [lora.device_bytes for lora in loras],
        "loaded": [name for name, model in models.items() if loaded(model)],
    })  # fmt: skip
    if self._store is None:
        self._store = BlockStore(self._tensors, device, policy="resident", ram_budget=2**30, ring=RING)
        self._close_store = weakref.finalize(self, self._store.close)
    return self._store.source(expert)


def loaded(model: object) -> bool:
    return any(entry.model is not None and model.is_clone(entry.model) for entry in management.current_loaded_models)


Placement.source, patches.PatchStore = source, KeptPatches
models = dict(zip(("high", "low"), load.experts("high.safetensors", "low.safetensors", "as stored")[:2], strict=True))
for model in models.values():
    weight = "diffusion_model.blocks.0.self_attn.q.weight"
    size = model.model.wanfit_runtime.shape.dim
    assert model.add_patches({weight: ("diff", (torch.randn(size, size) / 100,))}, 1.0)
noise = torch.Generator().manual_seed(1)
texts = [[[torch.randn(1, 16, 4096, generator=noise), {}]] for _ in range(2)]
settings = sampler.Settings(3, 6, 3.0, 1.0, "euler", "simple", 5.0, 0.0, 0, 0, 10000, True, False)
with torch.inference_mode():
    _, info = sampler.sample(*models.values(), *texts, {"samples": torch.zeros(1, 16, 1, 6, 4)}, settings)
store = next(iter(models.values())).model.wanfit_runtime.placement.store
entered = [step.key[0] for step in store.trace.of("enter")]
held = store.report.host_bytes, store.report.device_bytes
placement = weakref.ref(next(iter(models.values())).model.wanfit_runtime.placement)
del model
models.clear()
gc.collect()
kept = {
    "alive": placement() is not None,
    "before": held,
    "after": (store.report.host_bytes, store.report.device_bytes),
}
print(json.dumps({"seen": seen, "info": info, "entered": entered, "released": released, "kept": kept}))

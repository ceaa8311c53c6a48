"""Run by a ComfyUI's own Python, in its tree: failures at chosen places of the nodes, in this process.

python comfy_failures.py PACK FOLDER FIRST:LAST [options of ComfyUI]
python comfy_failures.py PACK FOLDER run|resume [options of ComfyUI]    one long run, to be killed; or the rest of it,
                                                                        and whether that is the undisturbed run

FOLDER holds high.safetensors, low.safetensors and vae.safetensors. Prints one JSON line for each case.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import random
import sys
from pathlib import Path

pack, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
sys.argv = [sys.argv[0], *sys.argv[4:]]
sys.path.insert(0, ".")

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management as management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import utils.install_util  # noqa: E402, F401 - before anything else is imported under that name, as main.py does
from safetensors.torch import load_file  # noqa: E402

folder_paths.add_model_folder_path("diffusion_models", str(folder))
folder_paths.set_output_directory(str(folder / "output"))
folder_paths.set_input_directory(str(folder / "input"))
(folder / "input").mkdir(exist_ok=True)

spec = importlib.util.spec_from_file_location(
    "wanfit_pack", pack / "__init__.py", submodule_search_locations=[str(pack)]
)
module = importlib.util.module_from_spec(spec)
sys.modules["wanfit_pack"] = module
spec.loader.exec_module(module)
from wanfit_pack.nodes import decode as decode_node  # noqa: E402
from wanfit_pack.nodes import sampler as sampler_node  # noqa: E402
from wanfit_pack.nodes._comfy import decode, errors, load, resume, sampler  # noqa: E402
from wanfit_pack.src.wanfit.checkpoint.reader import Checkpoint  # noqa: E402

DEVICE = management.get_torch_device()
VRAM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 15.92 GiB of which 600.00 MiB is "
    "free. Including non-PyTorch memory, this process has 15.30 GiB memory in use. Of the allocated memory 14.90 GiB is "
    "allocated by PyTorch, and 90.00 MiB is reserved by PyTorch but unallocated."
)


def vram() -> None:
    raise torch.OutOfMemoryError(VRAM)


def ram() -> None:
    torch.empty(2**60, dtype=torch.uint8)  # more than an address space: refused on every machine


def child() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    here.recv()


def interrupt() -> None:
    management.interrupt_current_processing()
    management.throw_exception_if_processing_interrupted()


FAILURES = {"vram": vram, "ram": ram, "child": child, "interrupt": interrupt}
CAUSES = {"vram": ("memory is full",), "ram": ("RAM is full",), "child": ("worker process ended",)}


class Fault:
    """Fails at its n-th call, and at the calls that follow it when it is lasting."""

    def __init__(self) -> None:
        self.calls, self.at, self.kind, self.lasting = 0, -1, "", False

    def set(self, at: int, kind: str, lasting: bool = False) -> None:
        self.calls, self.at, self.kind, self.lasting = 0, at, kind, lasting

    def __call__(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if self.kind and (number == self.at or (self.lasting and number > self.at >= 0)):
            FAILURES[self.kind]()


loading, attention, decoding, bringing = Fault(), Fault(), Fault(), Fault()


def before(owner: object, name: str, fault: Fault) -> None:
    """`fault` is asked at each call of a function."""
    original = getattr(owner, name)

    def watched(*args: object, **kwargs: object) -> object:
        fault()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


before(Checkpoint, "load", loading)
before(decode, "_weights", decoding)
before(management, "load_models_gpu", bringing)


def attend(function: object, *args: object, **kwargs: object) -> torch.Tensor:
    attention()
    return function(*args, **kwargs)


def models() -> tuple:
    with errors.in_words_of({"transformer": "model_high"}, "load"):
        high, low, _ = load.experts("high.safetensors", "low.safetensors", "as stored")
    for model in (high, low):
        model.model_options["transformer_options"]["optimized_attention_override"] = attend
    return high, low


def settings(sampler_name: str, steps: int) -> sampler.Settings:
    return sampler.Settings(3, steps, 3.0, 1.0, sampler_name, "simple", 5.0, 0.0, 0, 0, 10000, True, False)


noise = torch.Generator().manual_seed(1)
positive = [[torch.randn(1, 16, 4096, generator=noise), {}]]
negative = [[torch.randn(1, 16, 4096, generator=noise), {}]]
LATENT = {"samples": torch.zeros(1, 16, 1, 4, 2)}
STEPS, MANY = 5, 150


def record(every: int, again: bool) -> resume.Answers:
    return resume.Answers(folder / "output" / "wanfit_checkpoints" / "case", every, again)


def sample(pair: tuple, name: str, answers: resume.Answers, steps: int = STEPS) -> torch.Tensor:
    with errors.in_words_of(sampler_node.NAMES, "denoise"), torch.inference_mode():
        latent, _ = sampler.sample(*pair, positive, negative, dict(LATENT), settings(name, steps), answers)
    return latent["samples"]


def decoded(vae: object, latent: torch.Tensor) -> torch.Tensor:
    with errors.in_words_of(decode_node.NAMES, "decode"), torch.inference_mode():
        return decode.images({"samples": latent}, vae, 0, "7")


def held() -> dict[str, int]:
    gc.collect()
    device = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    return {"rss": psutil.Process().memory_info().rss, "device": device}


NAMES = ("euler", "uni_pc", "dpmpp_2m")
pair = models()
if what in ("run", "resume"):
    again = record(1, what == "resume")
    result = sample(pair, "uni_pc", again, steps=MANY)
    if what == "resume":
        same = torch.equal(result, sample(pair, "uni_pc", record(0, again=False), steps=MANY))
        print(json.dumps({"known": len(again._known), "same": same}))
    raise SystemExit
vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(folder / "vae.safetensors")))
expected, calls = {}, {}
for name in NAMES:
    attention.set(-1, "")
    bringing.set(-1, "")
    expected[name] = sample(pair, name, record(0, again=False))
    calls[name] = attention.calls
brought = bringing.calls
decoding.set(-1, "")
pixels = decoded(vae, expected["euler"])
decode_calls = decoding.calls
loading.set(-1, "")
models()
load_calls = loading.calls

begin, end = (int(number) for number in what.split(":"))
chooser = random.Random(begin)
STAGES = ("load", "denoise", "switch", "decode")


def attempt(call: object) -> tuple[object, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - what is raised is what is tested
        return None, error


def quiet() -> None:
    for fault in (loading, attention, decoding, bringing):
        fault.set(-1, "")


def one(number: int) -> dict[str, object]:
    stage, kind = STAGES[number % 4], list(FAILURES)[number // 4 % 4]
    name, every, lasting = NAMES[number // 16 % 3], 1 + number % 3, chooser.random() < 0.3
    quiet()
    case: dict[str, object] = {"stage": stage, "kind": kind, "sampler": name, "every": every, "lasting": lasting}
    if stage == "load":
        loading.set(chooser.randrange(load_calls), kind)
        made, error = attempt(models)
    elif stage == "decode":
        decoding.set(chooser.randrange(decode_calls), kind, lasting)
        made, error = attempt(lambda: decoded(vae, expected["euler"]))
    else:
        if stage == "switch":
            bringing.set(brought - 1, kind, lasting)
        else:
            attention.set(chooser.randrange(calls[name]), kind, lasting)
        first = record(every, again=False)
        made, error = attempt(lambda: sample(pair, name, first))
        # the call under way when it failed had no answer yet; at the switch none was under way
        case["answered"] = first._count - (stage == "denoise" and error is not None)
    raised = loading.kind or attention.kind or decoding.kind or bringing.kind
    case["fired"] = any(f.kind and f.calls > f.at for f in (loading, attention, decoding, bringing)) and bool(raised)
    text = "" if error is None else str(error)
    case |= {"finished": error is None, "error": type(error).__name__, "text": text}
    if error is not None:
        error.__traceback__ = None
    quiet()
    if stage == "load":
        again = made if made is not None else models()
        case["same"] = bool(again[0].model.diffusion_model is not None)
        if number % 40 == 0:
            case["same"] = torch.equal(sample(again, "euler", record(0, again=False)), expected["euler"])
    elif stage == "decode":
        frames = made if made is not None else decoded(vae, expected["euler"])
        case["same"] = float((frames - pixels).abs().max()) < (1e-4 if DEVICE.type == "cpu" else 2e-2)  # 16 bit there
        kept = folder / "input" / "wanfit_decode_7.latent"
        if "wanfit_decode_7" in text:
            case["kept"] = torch.equal(load_file(kept)["latent_tensor"], expected["euler"].cpu())
            kept.unlink()
    else:
        if made is None:
            files = sorted((folder / "output" / "wanfit_checkpoints" / "case").glob("*"))
            case["files"] = [file.name for file in files]
            answers = record(every, again=True)
            result = sample(pair, name, answers)
            case["resumed"] = len(answers._known)
        else:
            result = made
        difference = float((result - expected[name]).norm() / expected[name].norm())
        case["same"] = difference == 0.0 if made is None else difference < 2e-2 if lasting else difference < 1e-5
        case["difference"] = difference
    return case


quiet()
gc.collect()
gc.freeze()  # a collection over all imported modules takes half a second
for number in range(8):  # warm: what is built once is no leak
    one(number)
print(json.dumps({"before": held(), "device": str(DEVICE)}), flush=True)
for number in range(begin, end):
    print(json.dumps(one(number)), flush=True)
print(json.dumps({"after": held()}), flush=True)

"""One run: files and a request to a video file, with a memory record. Stages, in order:

    text -> encode image -> denoise high -> denoise low -> decode and save

Each stage gives its memory back before the next begins. Everything that can be refused is refused before
weights are read, in the order: numbers, headers, prompt, output file, memory.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..checkpoint import Identity
from ..errors import InputError, OutputError, RunError
from ..memory.advice import Search
from ..memory.explain import explain
from ..memory.facts import gather
from ..memory.plan import Plan
from ..memory.purge import empty_device_cache
from ..memory.record import MemoryRecord
from ..memory.report import plan_line, planned_peaks
from ..memory.versions import installed_version
from ..quant.float8_matmul import float8_units
from ..quant.triton_support import triton_refusal
from .decode import decode_to
from .denoise import denoise
from .experts import attention_of
from .files import ModelFiles
from .loras import match_loras
from .opened import open_model
from .outputs import check_output
from .placement import Placement
from .plan import bytes_of, machine_of, plan_run, read_model
from .report import RunReport
from .request import Request, Settings, settle
from .resume import Progress, beside, facts_of
from .size import decide_size, options_for_size
from .text import encode_prompts, load_text_encoder, load_tokenizer, prompt_ids
from .vae import load_vae
from .video import VideoWriter

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "gguf")


def generate(
    files: ModelFiles,
    request: Request,
    placement: Placement,
    *,
    report_path: Path | None = None,
    chart_path: Path | None = None,
    resume: Path | None = None,
    save_every: int = 1,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Make one video.

    Args:
        report_path, chart_path: where the memory report (JSON) and its picture (PNG) go; None for nowhere.
        resume: the file that the same run left when it was broken off.
        save_every: steps between two writes of such a file, beside the video; 0: when the run is broken off only.
        tell: called with a line of text at each step that a person wants to see; inputs in angle brackets.
    Returns: the report.
    Raises: WanFitError, RunError among them; nothing is left at `request.out` then, nor after an interrupt; what was
        reached is kept beside it.
    """
    if save_every < 0:
        raise InputError("number_invalid", "input", f"<save_every> is {save_every}", "Use 0 or more")
    check_output("out", request.out, ".mp4")
    for name, path, suffix in (("report", report_path, ".json"), ("chart", chart_path, ".png")):
        if path is not None:
            check_output(name, path, suffix)
    images = [path.resolve() for path in (request.image, request.last_image) if path is not None]
    if chart_path is not None and chart_path.resolve() in images:
        raise OutputError(
            "output_unwritable", "input", f"<chart> {chart_path} would replace the image", "Give another name"
        )
    with ExitStack() as stack:
        model = stack.enter_context(open_model(files))
        identities, variant = model.identities, model.variant
        high = identities[0]
        loras = match_loras(request.loras, model.transformers)
        parts = read_model(model)
        if request.automatic:
            known = options_for_size(request, placement.chunk_tokens, bytes_of(loras.patches, placement.dtype))
            request, size = decide_size(request, Search(parts, machine_of(placement), known), resume)
            tell(size)
        settings = settle(request, high, variant)
        tokenizer = load_tokenizer(model.tokenizer or model.text_encoder)
        prompts = {"prompt": settings.prompt}
        if settings.uses_guidance:
            prompts["negative_prompt"] = settings.negative_prompt
        lengths = [len(prompt_ids(tokenizer, prompt, name=name)) for name, prompt in prompts.items()]
        facts = facts_of(files, request, settings, placement)
        progress = Progress(resume or beside(settings.out), facts, settings.steps, tell, save_every)
        if resume is not None:
            progress.resume()
        elif progress.path.exists():
            tell(f"note: {progress.path} is of a run that was broken off; with <resume> it would go on from there")
        stack.enter_context(progress)
        writer = stack.enter_context(
            VideoWriter(
                settings.out,
                width=settings.width,
                height=settings.height,
                fps=settings.fps,
                num_frames=settings.num_frames,
            )
        )
        _announce(identities, settings, placement, tell)
        plan = plan_run(parts, settings, placement, loras.patches, text_tokens=max(lengths))
        for lora in loras.applied:
            tell("lora {file} x {strength:g} on {expert}: {tensors} tensors, ranks {ranks}".format_map(lora))
        for notice in loras.notices:
            tell(f"note: {notice}")
        tell(plan_line(plan))
        record = MemoryRecord(placement.device, planned=planned_peaks(plan))

        def begin(stage: str) -> None:
            tell(f"stage: {stage}")
            record.begin(stage)

        report = RunReport(
            _facts(files, identities, settings, placement) | {"loras": list(loras.applied), "plan": plan.to_json()},
            record,
            title=f"{high.variant}, {settings.width}x{settings.height}x{settings.num_frames}, {placement.device}",
            json_path=report_path,
            chart_path=chart_path,
            tell=tell,
        )
        with record, report.of_a_failure(), explained(placement, record):
            begin("text")
            encoder = load_text_encoder(
                model.text_encoder,
                device=placement.device,
                compute_dtype=torch.float32,  # once for each run, and the same on every machine
                placement="stream" if placement.text == "stream" else "cpu",
            )
            embeddings = encode_prompts(encoder, tokenizer, list(prompts.values()), names=list(prompts))
            encoder.release()
            model.text_encoder.close()
            empty_device_cache(placement.device)

            if settings.image is not None:
                begin("encode image")
            vae = load_vae(model.vae, placement.vae_dtype)
            vae.budget_bytes = plan.vae_budget
            if settings.image is not None:
                nn.Module.to(vae, placement.device)
            latents = denoise(
                model.transformers,
                settings,
                placement,
                plan,
                embeddings,
                vae,
                begin,
                tell,
                variant.expand_timesteps,
                loras.patches,
                progress,
            )

            begin("decode and save")
            nn.Module.to(vae, placement.device)
            decode_to(vae, model.vae.identity.variant, latents, writer)
    # The writer has renamed the file: from here on the video exists.
    try:
        said = report.write({"kernels": _kernels(high, placement, plan)})
    except OSError as error:
        raise OutputError(
            "output_unwritable",
            "save",
            f"the video is finished, {settings.out}, but its report or chart cannot be written: {error}",
            "Give another <report> or <chart>",
        ) from error
    for path in (settings.out, chart_path, report_path):
        if path is not None:
            tell(f"wrote {path}")
    return said


@contextmanager
def explained(placement: Placement, record: MemoryRecord) -> Generator[None]:
    """Turn a failure whose cause is known into one sentence; others pass.

    Raises: RunError: run_failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError, EOFError) as error:
        facts = gather(placement.device, placement.vae_dtype, record)
        found = explain(error, facts)
        if found is None:
            raise
        raise RunError("run_failed", facts.stage or "run", found.what, found.change) from error


def _announce(
    identities: list[Identity], settings: Settings, placement: Placement, tell: Callable[[str], None]
) -> None:
    for identity in identities:
        tell(identity.describe())
    for notice in settings.notices:
        tell(f"note: {notice}")
    given = {
        "vram_budget": placement.vram_budget is not None,
        "ram_budget": placement.ram_budget is not None,
        "policy": placement.policy != "auto",
    }
    idle = [f"<{name}>" for name, is_given in given.items() if is_given]
    if placement.device.type == "cpu" and idle:
        tell(f"note: {', '.join(idle)}: without effect on the CPU, where blocks are read from the file in place")
    split = ""
    if settings.boundary_ratio is not None:
        split = (
            f" ({settings.high_steps} high, {settings.steps - settings.high_steps} low; "
            f"boundary {settings.boundary_ratio})"
        )
        if settings.high_steps in (0, settings.steps):
            tell("note: one expert takes every step; more steps or another boundary would use both")
    tell(
        f"{settings.width}x{settings.height}, {settings.num_frames} frames, {settings.steps} steps{split}, "
        f"{settings.sampler} shift {settings.shift}, seed {settings.seed}, on {placement.device} in "
        f"{str(placement.dtype).removeprefix('torch.')}"
    )


def _facts(
    files: ModelFiles,
    identities: list[Identity],
    settings: Settings,
    placement: Placement,
) -> dict[str, Any]:
    names = ("width", "height", "num_frames", "steps", "high_steps", "seed", "sampler", "shift", "boundary_ratio")
    names += ("guidance_scale", "guidance_scale_2", "fps", "prompt", "negative_prompt")
    paths = {"high": files.high, "low": files.low, "text_encoder": files.text_encoder, "vae": files.vae}
    return {
        "wanfit": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES}
        | {"triton": installed_version("triton") or installed_version("triton-windows") or None},
        "files": {role: str(path) for role, path in paths.items() if path is not None},
        "transformers": [identity.to_json() for identity in identities],
        "settings": {name: getattr(settings, name) for name in names} | {"out": str(settings.out)},
        "device": str(placement.device),
        "card": torch.cuda.get_device_name(placement.device) if placement.device.type == "cuda" else None,
        "dtype": str(placement.dtype).removeprefix("torch."),
        "policy": placement.policy,
    }


def _kernels(identity: Identity, placement: Placement, plan: Plan) -> dict[str, object]:
    return {
        "fp8_matmul": placement.float8_matmul is None and float8_units(placement.device),
        "triton": triton_refusal(placement.device) or "used",
        "attention": str(attention_of(identity, placement, plan)),
    }

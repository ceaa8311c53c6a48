"""What a run has reached, kept in one file: the same run goes on from it after a crash, a cancel or a lack of memory.

Kept are the latents after a step and what the sampler remembers of the steps before. A resumed run passes through the
steps that are done without computing them and takes both from the file, so its result is that of the undisturbed run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import diffusers
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointError, InputError, WanFitError
from .files import ModelFiles
from .placement import Placement
from .request import Request, Settings

_LATENTS, _SAMPLER = "latents", "sampler"


class Progress:
    """The progress of one run, in one file, which is written whole or not at all and removed when the run is complete.

    Use as a context manager around everything from the first step to the finished video: left by an error, it writes
    what was reached and says where.

    Args:
        path: of the file; a run that is resumed goes on keeping its progress there.
        facts: what the result depends on, by name.
        steps: of the whole run. every: steps between two writes; 0 writes when the run is broken off only.
        tell: told what a person should know.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, str], steps: int, tell: Callable[[str], None], every: int = 1
    ) -> None:
        self.path, self._facts, self._steps, self._tell, self._every = path, dict(facts), steps, tell, every
        self.resumed = 0
        """Steps that come from the file."""
        self._done = self._written = 0
        self._state: tuple[torch.Tensor, dict[str, Any]] | None = None

    def resume(self) -> None:
        """Go on from the file.

        Raises:
            CheckpointError: file_missing, file_damaged. InputError: resume_mismatch: it is of another run.
        """
        metadata, tensors = _read(self.path)
        try:
            facts: dict[str, str] = json.loads(metadata["facts"])
            sampler: dict[str, Any] = json.loads(metadata[_SAMPLER])
            done, latents = int(metadata["done"]), tensors[_LATENTS]
        except (KeyError, ValueError) as error:
            raise _damaged(self.path, error) from error
        different = [name for name in self._facts if facts.get(name) != self._facts[name]]
        if different:
            said = "; ".join(f"{n} was {facts.get(n)} and is {self._facts[n]}" for n in different)
            raise InputError(
                "resume_mismatch",
                "load",
                f"<resume> {self.path} is of another run: {said}",
                "Set everything as it was, or begin anew without <resume>",
            )
        self.resumed = self._written = done
        self._state = latents, {name: _decode(value, tensors) for name, value in sampler.items()}
        self._tell(f"resumed: {done} of {self._steps} steps are done, from {self.path}")

    @property
    def skipping(self) -> bool:
        """Whether the step under way is done already, so that its result does not matter."""
        return self._done < self.resumed

    def after_step(self, latents: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """Keep what a step has reached; returns the latents to go on with.

        Args:
            scheduler: diffusers' one, of which everything that it remembers is kept.
        """
        self._done += 1
        if self._done < self.resumed:
            return latents
        if self._done == self.resumed and self._state is not None:
            known, state = self._state
            for name, value in state.items():
                setattr(scheduler, name, _moved(value, getattr(scheduler, name, None), latents.device))
            return known.to(latents)
        self._state = latents, _state_of(scheduler)
        if self._every and self._done % self._every == 0:
            self._write()
        return latents

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.path.unlink(missing_ok=True)
        else:
            if self._done > self._written:
                self._write()
            if self._written:
                way = f"the same command with <resume> {self.path} goes on from there"
                self._tell(f"kept: {self._written} of {self._steps} steps; {way}")
                if isinstance(error, WanFitError):
                    error.add_change(f"{self._written} steps are kept: {way}")
        self._state = None

    def _write(self) -> None:
        """A write that fails costs no run: it is told, and tried again after the next step."""
        if self._state is None:
            return
        latents, state = self._state
        unfinished = self.path.with_suffix(".part")
        try:
            tensors = {_LATENTS: latents.detach().cpu().contiguous()}
            sampler = {name: _encode(name, value, tensors) for name, value in state.items()}
            metadata = {"facts": json.dumps(self._facts), _SAMPLER: json.dumps(sampler), "done": str(self._done)}
            save_file(tensors, str(unfinished), metadata)
            unfinished.replace(self.path)
        except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: the device does not answer any more
            self._tell(f"note: the progress cannot be kept in {self.path}: {error}")
            unfinished.unlink(missing_ok=True)
            return
        self._written = self._done


def kept_facts(path: Path) -> dict[str, str]:
    """What the result of the run depends on that left this file.

    Raises:
        CheckpointError: file_missing, file_damaged.
    """
    metadata, _ = _read(path)
    try:
        return json.loads(metadata["facts"])
    except (KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise CheckpointError(
            "file_missing", "load", f"<resume> {path} {what}", "Give the .resume.safetensors that the run named"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "file_damaged",
        "load",
        f"<resume> {path} holds no progress of a run ({type(error).__name__}: {error})",
        "Give the .resume.safetensors that the run named, or begin anew without <resume>",
    )


def beside(out: Path) -> Path:
    """Where a run keeps its progress unless told otherwise."""
    return out.with_suffix(".resume.safetensors")


def facts_of(files: ModelFiles, request: Request, settings: Settings, placement: Placement) -> dict[str, str]:
    """What decides about the result: inputs, files by name and size, precision. Memory settings may change."""
    names = "prompt width height num_frames steps high_steps seed sampler shift boundary_ratio guidance_scale"
    facts = {name: str(getattr(settings, name)) for name in names.split()}
    if settings.uses_guidance:
        facts["negative_prompt"] = settings.negative_prompt
    if settings.boundary_ratio is not None:
        facts["guidance_scale_2"] = str(settings.guidance_scale_2)
    for name, image in (("image", settings.image), ("last_image", settings.last_image)):
        facts[name] = "none" if image is None else _fingerprint(image)
    paths = {"high": files.high, "low": files.low, "text_encoder": files.text_encoder, "vae": files.vae}
    facts |= {name: "none" if path is None else f"{path.name} ({_size(path)} bytes)" for name, path in paths.items()}
    loras = [f"{x.path.name} ({_size(x.path)} bytes) at {x.strength:g} on {x.expert}" for x in request.loras]
    facts["lora"] = ", ".join(loras) or "none"
    facts["dtype"] = str(placement.dtype).removeprefix("torch.")
    facts["diffusers"] = diffusers.__version__
    return facts


def _fingerprint(image: Image.Image) -> str:
    return f"{image.width}x{image.height} {hashlib.sha256(image.tobytes()).hexdigest()[:12]}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _state_of(scheduler: Any) -> dict[str, Any]:
    """Everything plain that a scheduler holds: numbers, tensors, and lists of them."""
    state: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        items = value if isinstance(value, list) else [value]
        if all(item is None or isinstance(item, bool | int | float | str | torch.Tensor) for item in items):
            state[name] = list(items) if isinstance(value, list) else value
    return state


def _encode(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_encode(f"{name}.{index}", item, tensors) for index, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        tensors[f"{_SAMPLER}.{name}"] = value.detach().cpu().clone().contiguous()
        return {"tensor": f"{_SAMPLER}.{name}"}
    return value


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    return tensors[value["tensor"]] if isinstance(value, dict) else value


def _moved(value: Any, present: Any, device: torch.device) -> Any:
    """A stored value on the device where the scheduler has its present one, else on that of the latents."""
    if isinstance(value, list):
        return [_moved(item, None, device) for item in value]
    if isinstance(value, torch.Tensor):
        return value.to(present.device if isinstance(present, torch.Tensor) else device)
    return value

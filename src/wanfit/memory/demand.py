"""Bytes that each stage of a run needs, by cause: on the device and in RAM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..blocks import ForwardSettings, Moment, moments
from ..vae.spool import HOST_BYTES, waiting_bytes
from ..vae.tile_plan import TilePlan
from .machine import Machine
from .parts import TextPart, TransformerPart, VaePart

RING = 2
"""Device slots, and host buffers, for passing blocks."""

VIDEO = "video to encode"
"""A cause: the frames that the VAE is given."""

SAVING = ("frames waiting", "video encoder")
"""Causes: beside a decode."""

FLOAT = 4
TEXT_TOKENS = 512
HEAD_DIM = 128
TEXT_DIM = 4096

LIBRARIES = 36 * 2**20
"""cuBLAS's workspace (32 MiB on sm_90, less elsewhere), small tensors: on a card, inside PyTorch's allocator."""

_DEQUANTISE: Mapping[str, float] = {
    **dict.fromkeys(("f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "q8_0"), 0.2),
    "int8": 1.0,
}
_OTHER = 1.6
"""Bytes an element beyond the result, while one matrix is dequantised (tests/unit/quant/test_cost.py)."""

_FLOAT8 = frozenset({"f8_e4m3", "f8_e5m2"})
_NO_COPY = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Video:
    """What is to be made.

    Args:
        text_tokens: of the longest prompt. prompts: 2 with guidance.
        image: whether an image is encoded first.
        batch: videos in one forward; the VAE takes one after the other.
    """

    width: int
    height: int
    num_frames: int
    image: bool
    size_multiple: int = 16
    text_tokens: int = TEXT_TOKENS
    prompts: int = 2
    batch: int = 1

    @property
    def latent_frames(self) -> int:
        return (self.num_frames - 1) // 4 + 1

    @property
    def tokens(self) -> int:
        """Of one video in a forward."""
        return self.latent_frames * (self.width // self.size_multiple) * (self.height // self.size_multiple)


@dataclass(frozen=True)
class Demand:
    """One stage. Bytes by cause at its worst moment.

    Args:
        vram: on the device, inside PyTorch's allocator.
        ram: in RAM, of the process's own; it cannot be taken back.
        mapped: of the model files, read in place: the system drops those pages when room is needed.
        optional: device bytes that are used when they are there: blocks that stay.
    """

    name: str
    vram: Mapping[str, int] = field(default_factory=dict[str, int])
    ram: Mapping[str, int] = field(default_factory=dict[str, int])
    mapped: int = 0
    optional: int = 0

    @property
    def vram_needed(self) -> int:
        return sum(self.vram.values())

    @property
    def vram_peak(self) -> int:
        """With the blocks that are planned to stay."""
        return self.vram_needed + self.optional

    @property
    def ram_needed(self) -> int:
        return sum(self.ram.values())


def text_demand(part: TextPart, video: Video, machine: Machine) -> Demand:
    """Both prompts in one pass, in float32; one linear at a time, as stored and dequantised."""
    rows, length = video.prompts, video.text_tokens
    scores = 3 * rows * part.num_heads * length * length * FLOAT  # scores, position bias added, softmax
    inner = 3 * rows * length * part.ffn_dim * FLOAT
    hidden = 6 * rows * length * part.dim * FLOAT
    work = {
        "one linear in float32": part.ffn_dim * part.dim * (FLOAT + 2),
        "activations": max(scores, inner) + hidden,
    }
    if machine.text == "stream" and machine.device == "cuda":
        return Demand("text", {"one linear as stored": part.largest, **work, "libraries": LIBRARIES}, {}, part.nbytes)
    return Demand("text", {}, work, part.nbytes)


def forward_causes(
    part: TransformerPart, video: Video, machine: Machine, settings: ForwardSettings, *, loras: bool = False
) -> dict[str, int]:
    """One forward of the transformer, with or without LoRAs; their own bytes and blocks' weights not counted."""
    item = machine.dtype.itemsize
    context = TEXT_TOKENS + (257 if part.image_dim else 0)
    every = moments(
        part.shape,
        settings,
        batch=video.batch,
        tokens=video.tokens,
        itemsize=item,
        context_tokens=context,
        cuda=machine.device == "cuda",
        fused=machine.fused,
        low_rank=loras and machine.fused and machine.float8 and not part.formats.isdisjoint(_FLOAT8),
    )
    copies = {moment: weight_copies(part, machine, moment) for moment in every}
    worst = max(every, key=lambda moment: moment.activations + copies[moment])
    places = video.batch * video.latent_frames * _latent_area(video, part)
    # scheduler: latents, two past outputs, last sample; condition; model input; two predictions
    latents = places * (FLOAT * (4 * part.out_channels + max(0, part.in_channels - part.out_channels)))
    latents += places * item * (part.in_channels + 2 * part.out_channels)
    causes = {
        "residual": worst.residual,
        "q, k, v": worst.heads,
        "chunk": worst.work,
        "rotary table": 2 * video.tokens * HEAD_DIM * FLOAT,
        "weights in compute precision": copies[worst],
        "latents": latents,
        "text embeddings": video.batch * video.prompts * TEXT_TOKENS * TEXT_DIM * FLOAT,
        "context": video.batch * context * part.dim * item,
    }
    if machine.device == "cuda":
        causes["libraries"] = LIBRARIES
    return causes


def weight_copies(part: TransformerPart, machine: Machine, moment: Moment) -> int:
    """Matrices of the running block in compute precision."""
    same = {key for key, name in _NO_COPY.items() if name == str(machine.dtype).removeprefix("torch.")}
    if machine.float8:
        same |= _FLOAT8
    formats = part.formats - same
    if not formats:
        return 0
    fused = {"q8_0", "q4_k", "q5_k", "q6_k"} if machine.fused else set[str]()
    extra = max(_DEQUANTISE.get(name, _OTHER) if name not in fused else 0.2 for name in formats)
    return int(moment.matrices * machine.dtype.itemsize + moment.largest * extra)


def denoise_demand(
    name: str,
    part: TransformerPart,
    slot_bytes: int,
    video: Video,
    machine: Machine,
    settings: ForwardSettings,
    *,
    loras: bool = False,
) -> Demand:
    """All steps of one expert. On the CPU everything is RAM and the blocks are read in place."""
    causes = {"weights outside the blocks": part.rest_bytes(machine.dtype)}
    causes |= forward_causes(part, video, machine, settings, loras=loras)
    if machine.device == "cpu":
        return Demand(name, {}, causes, part.nbytes)
    slots = {"passing blocks": RING * slot_bytes}
    return Demand(name, slots | causes, {"passing blocks": RING * slot_bytes}, part.nbytes)


def switch_demand(before: Demand, part: TransformerPart, machine: Machine) -> Demand:
    """The moment between the experts: the second one's small weights come in beside the slots that stay."""
    causes = {
        "weights outside the blocks": part.rest_bytes(machine.dtype),
        "one tensor as stored": part.rest_largest,
    }
    kept = ("passing blocks", "latents", "text embeddings")
    held = {cause: nbytes for cause, nbytes in {**before.vram, **before.ram}.items() if cause in kept}
    if machine.device == "cpu":
        return Demand("switch", {}, held | causes, part.nbytes)
    ram = {cause: nbytes for cause, nbytes in before.ram.items() if cause in kept}
    return Demand("switch", held | causes, ram, part.nbytes, before.optional)


def vae_demand(name: str, plan: TilePlan, part: VaePart, video: Video, machine: Machine) -> Demand:
    """One pass of the VAE, all of whose weights are on the device; frames go to the host as they come."""
    memory = plan.memory
    work = {
        "VAE": vae_weights(part, machine),
        "histories": memory.histories,
        "prepared input": memory.prepared,
        "activations": memory.activations,
        "convolution workspace": memory.workspace,
    }
    features = {"features between the passes": waiting_bytes(plan.feature_bytes, HOST_BYTES)}
    if plan.direction == "encode":
        single = plan.shape[2] == 1
        passing = sum(work.values()) - work["VAE"]
        work |= {VIDEO: video_to_encode(video, machine, single=single)}
        work |= {"the video in float32 before that": max(0, _conversion(video, machine, single=single) - passing)}
    else:
        work |= {"latents": latents_bytes(plan.shape)}
        features |= saving_causes(video.width, video.height, video.num_frames, plan.tiles)
    work = {cause: nbytes for cause, nbytes in work.items() if nbytes}
    if machine.device == "cpu":
        return Demand(name, {}, work | features, part.nbytes)
    return Demand(name, work | {"libraries": LIBRARIES}, features, part.nbytes)


def latents_bytes(shape: Sequence[int]) -> int:
    """What a decode holds of latents of this shape: as sampled, in order, and without their mean."""
    return 3 * FLOAT * math.prod(shape)


def saving_causes(width: int, height: int, num_frames: int, tiles: int) -> dict[str, int]:
    """Frames that wait for their other tiles, and what x264 keeps to look ahead (64 pictures in YUV 4:2:0)."""
    picture = width * height
    waiting = waiting_bytes(3 * num_frames * picture, HOST_BYTES // 2) if tiles > 1 else 0
    return dict(zip(SAVING, (waiting + 3 * picture, 64 * picture * 3 // 2), strict=True))


def video_to_encode(video: Video, machine: Machine, *, single: bool) -> int:
    """The image in float32, and with the empty frames behind it in the VAE's precision."""
    picture = 3 * video.width * video.height
    return picture * FLOAT + picture * (1 if single else video.num_frames) * machine.vae_dtype.itemsize


def _conversion(video: Video, machine: Machine, *, single: bool) -> int:
    """The same frames in float32, before they are converted and encoded."""
    frames = 1 if single else video.num_frames
    return 0 if machine.vae_dtype.itemsize == FLOAT else 3 * video.width * video.height * frames * FLOAT


def vae_weights(part: VaePart, machine: Machine) -> int:
    return part.elements * machine.vae_dtype.itemsize


def _latent_area(video: Video, part: TransformerPart) -> int:
    step = video.size_multiple // 2
    return (video.width // step) * (video.height // step)

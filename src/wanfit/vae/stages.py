"""Stages put together, however the layers were found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import CheckpointError
from .layers import Downsample, Layer, Stage, Upsample, VaeModel


def assemble(
    trunk: Sequence[Layer],
    ups: Sequence[Stage],
    head: Layer,
    first: Layer,
    downs: Sequence[Stage],
    tail: Sequence[Layer],
    patch: int,
) -> VaeModel:
    """Both halves: the decoder's part at latent resolution, its up blocks, its output; the encoder the other way.

    Raises: CheckpointError model_unsupported: attention where tiles would be.
    """
    for stage in (*ups, *downs):
        if not stage.tileable:
            raise unsupported("<vae> has attention outside its middle block")
    # The shortcut of a stage goes round its own layers only, so head and first layer become stages when one is
    # there.
    decoder = [Stage(tuple(trunk)), *ups]
    if ups[-1].shortcut:
        decoder.append(Stage((head,)))
    else:
        decoder[-1] = Stage((*ups[-1].layers, head))
    encoder = [*downs, Stage(tuple(tail))]
    if downs[0].shortcut:
        encoder.insert(0, Stage((first,)))
    else:
        encoder[0] = Stage((first, *downs[0].layers))
    channels = decoder[-1].outputs // patch**2
    return VaeModel(tuple(decoder), tuple(encoder), patch, decoder[0].inputs, channels)


def split(layers: Iterable[Layer]) -> list[Stage]:
    """Stages of a flat list of layers: each ends with its change of resolution."""
    stages: list[Stage] = []
    pending: list[Layer] = []
    for layer in layers:
        pending.append(layer)
        if isinstance(layer, Upsample | Downsample):
            stages.append(Stage(tuple(pending)))
            pending = []
    if pending:
        stages.append(Stage(tuple(pending)))
    return stages


def unsupported(what: str) -> CheckpointError:
    return CheckpointError("model_unsupported", "decode", what, "Use the VAE of Wan 2.1 or of Wan 2.2")

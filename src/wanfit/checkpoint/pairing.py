"""Whether model files belong together."""

from __future__ import annotations

from ..errors import InputError
from .identity import Identity
from .variants import FILES, TITLES, VARIANTS


def check_pair(high: Identity, low: Identity) -> None:
    """Check the files given as the high-noise and the low-noise expert.

    Raises:
        InputError: pair_mismatch, with which file is wrong and what to give instead.
    """
    for slot, identity in (("transformer", high), ("transformer_2", low)):
        if identity.kind != "transformer":
            raise _mismatch(f"<{slot}> is a {TITLES[identity.variant]}", "Give a Wan transformer there")
        if not VARIANTS[identity.variant].has_experts and identity.version_certain:
            raise _mismatch(
                f"<{slot}> is {TITLES[identity.variant]}, which is one model and has no second expert",
                "Give it alone, or give the high- and the low-noise file of a Wan 2.2 A14B model",
            )
    if high.variant != low.variant:
        raise _mismatch(
            f"<transformer> is {_channels(high)} and <transformer_2> is {_channels(low)}",
            f"Give both experts of one model: {TITLES[high.variant]} or {TITLES[low.variant]}",
        )
    if _layout(high) != _layout(low):
        raise _mismatch(
            f"<transformer> has {_sizes(high)} and <transformer_2> has {_sizes(low)}",
            "Give both experts of the same model",
        )
    if (high.expert, low.expert) == ("low", "high"):
        raise _mismatch(
            f"<transformer> is the low-noise expert (from the {high.expert_source}) and <transformer_2> the "
            f"high-noise one (from the {low.expert_source})",
            "Swap the two files: <transformer> takes the high-noise expert",
        )
    if high.expert == "low":
        raise _same("transformer", high, "high")
    if low.expert == "high":
        raise _same("transformer_2", low, "low")


def check_parts(transformer: Identity, vae: Identity | None = None, text_encoder: Identity | None = None) -> None:
    """Check that the VAE and the text encoder fit the transformer; None for a part that is not used.

    Raises:
        InputError: pair_mismatch, naming the file that fits.
    """
    if transformer.kind != "transformer":
        raise _mismatch(f"<transformer> is a {TITLES[transformer.variant]}", "Give a Wan transformer there")
    wanted = VARIANTS[transformer.variant]
    if vae is not None:
        if vae.kind != "vae":
            raise _mismatch(f"<vae> is a {TITLES[vae.variant]}", f"Give {FILES[wanted.vae]}")
        if vae.variant != wanted.vae:
            raise _mismatch(
                f"<vae> is the {TITLES[vae.variant]} with {vae.out_channels} latent channels and {wanted.title} works "
                f"with {transformer.out_channels}",
                f"Give the {TITLES[wanted.vae]}, {FILES[wanted.vae]}",
            )
    if text_encoder is not None:
        if text_encoder.kind != "text_encoder":
            raise _mismatch(f"<text_encoder> is a {TITLES[text_encoder.variant]}", f"Give {FILES[wanted.text_encoder]}")
        if text_encoder.dim != transformer.text_dim:
            raise _mismatch(
                f"<text_encoder> gives vectors of {text_encoder.dim} numbers and {wanted.title} takes "
                f"{transformer.text_dim}",
                f"Give the {TITLES[wanted.text_encoder]}, {FILES[wanted.text_encoder]}",
            )


def _same(slot: str, identity: Identity, wanted: str) -> InputError:
    return _mismatch(
        f"<{slot}> is the {identity.expert}-noise expert (from the {identity.expert_source}), where the {wanted}-noise "
        "one belongs",
        f"Give the {wanted}-noise file of {TITLES[identity.variant]} as <{slot}>",
    )


def _layout(identity: Identity) -> tuple[int, ...]:
    return identity.dim, identity.num_layers, identity.ffn_dim, identity.in_channels, identity.text_dim


def _sizes(identity: Identity) -> str:
    return f"{identity.num_layers} blocks of width {identity.dim}"


def _channels(identity: Identity) -> str:
    return f"{TITLES[identity.variant]} ({identity.in_channels} channels in, width {identity.dim})"


def _mismatch(what: str, change: str) -> InputError:
    return InputError("pair_mismatch", "input", what, change)

"""Engine errors in the words of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...src.wanfit.errors import WanFitError


class NodeError(Exception):
    """An error as the user of a node sees it: its text names the node's own inputs."""


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Raise engine errors of the `with` body as NodeError; `names` maps `num_frames` to `length` ..."""
    try:
        yield
    except WanFitError as error:
        raise NodeError(error.render(names)) from error

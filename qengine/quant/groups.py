"""Widths and group sizes that fit a module's tensors, when its config is silent or wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from qengine.errors import CheckpointError

logger = logging.getLogger(__name__)


def choose_bits(name: str, hint: int | None, fits: Callable[[int], bool], found: str) -> int:
    """The width that `fits` the shapes, the config's `hint` if it does; `found` describes the shapes for the error."""
    if isinstance(hint, int) and 2 <= hint <= 8 and fits(hint):
        return hint
    candidates = [bits for bits in (4, 8, 3, 2, 6, 5, 7) if fits(bits)]
    if not candidates:
        raise CheckpointError(
            f"{name}: its shapes fit no width from 2 to 8 bits ({found}; config: bits={hint}); "
            "the files are damaged or of an unknown format: convert the model again"
        )
    if hint is not None:
        logger.warning(
            "%s: config says bits=%s, its tensors hold %s bits; the tensors decide", name, hint, candidates[0]
        )
    return candidates[0]


def choose_group_size(name: str, in_features: int, groups: int, hints: Iterable[int]) -> int:
    """Group size (resolved, never -1) with ceil(K / size) == groups: the first hint that fits, else an even split."""
    given = [hint for hint in hints if isinstance(hint, int)]
    for hint in given:
        size = hint if hint > 0 else in_features
        if groups == -(-in_features // size):
            return size
    if groups > 0 and in_features % groups == 0:
        size = in_features // groups
        if any(hint > 0 for hint in given):
            logger.warning("%s: config says group_size=%s, its scales %s; the tensors decide", name, given[0], size)
        return size
    raise CheckpointError(
        f"{name}: {groups} groups do not fit in_features={in_features} and group_size={given[0] if given else -1}; "
        "the files or the config are wrong: convert the model again"
    )

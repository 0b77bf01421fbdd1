"""Which tokens rows with structured output may sample next: their grammars' masks with the requests' own bans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qengine.structured.matcher import words_of

if TYPE_CHECKING:
    from qengine.engine.sampler import SampleRow


def fill_masks(rows: Sequence[SampleRow], lines: np.ndarray) -> None:
    """Write a mask for each row: lines int32 [R, W], bit t % 32 of word t // 32 is 1 where token t may be sampled.

    What the grammar leaves is cut by allowed_token_ids (the end tokens stay), then by bad words and by the end tokens
    that min_tokens holds back; of the last two, one that would leave nothing does not count: a text that is complete
    ends. A row for which nothing is left has no bit set. The rows' tokens must all be known.
    """
    for row, line in zip(rows, lines, strict=True):
        matcher = row.matcher
        assert matcher is not None, "a mask is filled for rows with a grammar"
        matcher.follow(row.token_ids, row.num_prompt)
        matcher.fill(line)
        if row.params.allowed_token_ids is not None:
            line &= words_of([*row.params.allowed_token_ids, *matcher.stop_ids], len(line))
        _ban(line, row.completing_words())
        if row.num_output < row.params.min_tokens:
            _ban(line, row.banned_ids)


def _ban(line: np.ndarray, token_ids: Iterable[int]) -> None:
    ids = list(token_ids)
    if ids:
        left = line & ~words_of(ids, len(line))
        if left.any():
            line[:] = left

"""Changes to logits before a token is chosen: bans, biases and penalties, batched over the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from qengine.engine.token_masks import fill_masks
from qengine.structured.matcher import BITS, mask_words

if TYPE_CHECKING:
    from qengine.engine.sampler import SampleRow

NEVER = float("-inf")
Cells = tuple[list[int], list[int]]
"""Row and column numbers of single logits."""


def apply_rules(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """`scores` [R, V] float32 with every row's rules applied; a changed copy, or itself where no row has a rule."""
    changed = scores
    if not any(row.has_rules for row in rows):
        return scores
    for asks, rule in RULES:
        at = [i for i, row in enumerate(rows) if asks(row)]
        if not at:
            continue
        if changed is scores:
            changed = scores.clone()
        index = torch.tensor(at, device=scores.device)
        changed[index] = rule(changed[index], [rows[i] for i in at])
    return changed


def mask_tokens(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """-inf for what the rows' grammars, with their bans, do not allow next."""
    lines = np.zeros((len(rows), mask_words(scores.shape[1])), dtype=np.int32)
    fill_masks(rows, lines)
    words = torch.from_numpy(lines).to(scores.device)
    bits = (words[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=scores.device)) & 1
    return scores.masked_fill(bits.reshape(len(rows), -1)[:, : scores.shape[1]] == 0, NEVER)


def allow_only(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """-inf for all but allowed_token_ids."""
    forbidden = torch.ones_like(scores, dtype=torch.bool)
    forbidden[_cells([row.params.allowed_token_ids or () for row in rows], scores)] = False
    return scores.masked_fill(forbidden, NEVER)


def ban_words(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """-inf for tokens that would complete a bad word's token sequence in the output.

    A row in which nothing else is left (allowed_token_ids may see to that) keeps its scores.
    """
    changed = scores.clone()
    changed[_cells([row.completing_words() for row in rows], scores)] = NEVER
    empty = changed.max(dim=-1, keepdim=True).values == NEVER
    return torch.where(empty, scores, changed)


def ban_ends(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """-inf for end tokens and stop token ids before min_tokens."""
    scores[_cells([row.banned_ids for row in rows], scores)] = NEVER
    return scores


def add_bias(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Adds logit_bias."""
    biases = [row.params.logit_bias or {} for row in rows]
    values = [value for bias in biases for value in bias.values()]
    cells = _cells([list(bias) for bias in biases], scores)
    return scores.index_put(cells, torch.tensor(values, device=scores.device), accumulate=True)


def penalize(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Repetition (prompt and output), then frequency and presence (output only) penalties."""

    def column(name: str) -> torch.Tensor:
        values = [getattr(row.params, name) for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    width = scores.shape[1]
    zeros = torch.zeros_like(scores)
    one = torch.ones((), device=scores.device)
    output = [[t for t in row.token_ids[row.num_prompt :] if t < width] for row in rows]
    counts = zeros.index_put(_cells(output, scores), one, accumulate=True)
    prompt = [[t for t in row.token_ids[: row.num_prompt] if t < width] for row in rows]
    seen = (counts > 0) | (zeros.index_put(_cells(prompt, scores), one) > 0)
    repetition = column("repetition_penalty")
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - column("frequency_penalty") * counts - column("presence_penalty") * (counts > 0)


def _cells(columns: Sequence[Sequence[int]], scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors of (row, column) pairs, from each row's columns."""
    rows = [i for i, row in enumerate(columns) for _ in row]
    flat = [c for row in columns for c in row]
    return (
        torch.tensor(rows, dtype=torch.int64, device=scores.device),
        torch.tensor(flat, dtype=torch.int64, device=scores.device),
    )


def has_penalty(row: SampleRow) -> bool:
    """True if a penalty of the row changes anything."""
    p = row.params
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


Rule = tuple[Callable[["SampleRow"], bool], Callable[[torch.Tensor, "list[SampleRow]"], torch.Tensor]]
RULES: tuple[Rule, ...] = (
    (lambda row: row.matcher is not None, mask_tokens),
    (lambda row: row.params.allowed_token_ids is not None and row.matcher is None, allow_only),
    (lambda row: bool(row.bad_words) and row.matcher is None, ban_words),
    (lambda row: row.num_output < row.params.min_tokens and row.matcher is None, ban_ends),
    (lambda row: bool(row.params.logit_bias), add_bias),
    (has_penalty, penalize),
)

"""What the engine hands to a runner for one step, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from qengine.engine.block_manager import Copy
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs


@dataclass
class StepItem:
    """Tokens `token_ids[start:end]` of one sequence, whose cache lies in `block_table`.

    rows: the sequences for which a next token is drawn from the last position; empty in the midst of a prompt.
    scored: positions whose following token's logprob is wanted, within [start, end); num_logprobs: how many others.
    """

    seq_id: int
    token_ids: list[int]
    start: int
    end: int
    block_table: list[int]
    rows: list[SampleRow] = field(default_factory=list)
    scored: range = range(0)
    num_logprobs: int = 0


@dataclass
class StepResult:
    """samples: one for each row of each item, in order. prompt_logprobs: by seq_id, one for each scored position."""

    samples: Samples
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    def run(self, items: list[StepItem], copies: list[Copy]) -> StepResult:
        """Make the block copies, compute the items, write their cache and sample."""
        ...

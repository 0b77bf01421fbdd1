"""What the engine hands to a runner for one step, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from qengine.engine.block_manager import Copy
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs
from qengine.engine.swap_orders import SwapOrders


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


NO_SWAP = SwapOrders()
"""Orders of a step that copies nothing between the tiers."""


class Launched(Protocol):
    """A step under way."""

    def draw(self) -> None:
        """Sample, where that was left for `later`; before the next step is launched."""
        ...

    def result(self) -> StepResult:
        """Wait for the step."""
        ...


@dataclass
class Done:
    """A step that is over."""

    value: StepResult

    def draw(self) -> None:
        """See Launched."""

    def result(self) -> StepResult:
        """See Launched."""
        return self.value


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the step is over, so that the next one can be launched meanwhile.

        That one's items may then end in a token that is UNKNOWN, for whose sequence the runner samples it just now.
        """
        ...

    def launch(
        self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP, *, later: bool = False
    ) -> Launched:
        """`run`, without waiting for it.

        later: do not sample yet: rows look at tokens that the step before is still sampling. Launched.draw will be
        called when these are known. Only where `overlaps`.
        """
        ...

    def run(self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP) -> StepResult:
        """Make the copies between the tiers, those on the device, compute the items, write their cache and sample.

        swap: see SwapOrders for what must be finished when. A step without any must still wait for the late copies of
        the step before (SwapSpace.begin_step does).
        """
        ...

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Do now what the first steps of each shape would do beside their work. No step is under way.

        stop: asked again and again; True ends it, and a later call goes on. Returns whether all is done.
        """
        ...

    def close(self) -> None:
        """Give back what outlives the runner's tensors: the CPU memory for swapping."""
        ...

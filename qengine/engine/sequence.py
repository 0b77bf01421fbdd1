"""One sequence as the scheduler sees it: token ids and how many of them have their keys and values cached."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

UNKNOWN = -1
"""Stands in `token_ids` for a token that is being sampled."""


class Status(enum.Enum):
    """Where a sequence is.

    WAITING holds nothing. SWAPPED waits too, and its content is kept within reach (see block_manager.py). RUNNING
    holds a block table. FINISHED is gone from the queues.
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Prompt and output of one of a request's n sequences.

    id: unique in the engine. order: (rank, arrival of the request, index in it); the lower order is served first and
    preempted last; see Scheduler.rank. priority: the request's, lower is more urgent. token_ids: prompt, then output.
    num_computed: leading tokens whose keys and values are in the cache of the device. siblings: all sequences of the
    request, this one included. salt: prompts with other salts share no blocks. read_prefix_cache: False where every
    prompt position must be computed (prompt_logprobs). arriving: it runs, but its blocks are being copied back, so
    that it has not been computed since it was admitted. limit: tokens, prompt and output, at which it ends at the
    latest. num_unknown: trailing entries of token_ids that are UNKNOWN, as the steps that sample them still run.
    """

    id: int
    order: tuple[float, int, int]
    token_ids: list[int]
    num_prompt: int
    salt: bytes = b""
    read_prefix_cache: bool = True
    priority: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    arriving: bool = False
    limit: int = sys.maxsize
    num_unknown: int = 0

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    @property
    def index(self) -> int:
        """Which of the request's n sequences it is."""
        return self.order[-1]

    @property
    def waits(self) -> bool:
        """True if it is in the queue of those that hold no blocks of the device."""
        return self.status is Status.WAITING or self.status is Status.SWAPPED

    @property
    def num_output(self) -> int:
        """Tokens generated so far, those being sampled included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far, as far as they are known."""
        return self.token_ids[self.num_prompt : len(self.token_ids) - self.num_unknown]

    @property
    def is_full(self) -> bool:
        """True if its last token is there or being sampled: nothing is left to compute."""
        return len(self.token_ids) >= self.limit

    def expect(self) -> None:
        """Add a token that is being sampled."""
        self.token_ids.append(UNKNOWN)
        self.num_unknown += 1

    def learn(self, token: int) -> int:
        """Note the next sampled token; returns how many tokens of output are known now."""
        if self.num_unknown:
            self.token_ids[len(self.token_ids) - self.num_unknown] = token
            self.num_unknown -= 1
        else:
            self.token_ids.append(token)
        return self.num_output - self.num_unknown

    def forget_unknown(self) -> None:
        """Drop the tokens that are being sampled: they will not be wanted."""
        if self.num_unknown:
            del self.token_ids[-self.num_unknown :]
            self.num_unknown = 0

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: those a step may compute."""
        return len(self.token_ids) - self.num_computed

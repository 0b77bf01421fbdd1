"""One sequence as the scheduler sees it: token ids and how many of them have their keys and values cached."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    """Where a sequence is. WAITING holds no blocks; RUNNING holds a block table; FINISHED is gone from the queues."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Prompt and output of one of a request's n sequences.

    id: unique in the engine. order: (arrival of the request, index in it); the lower order is served first and
    preempted last. token_ids: prompt, then output. num_computed: leading tokens whose keys and values are in the
    cache. siblings: all sequences of the request, this one included. salt: prompts with other salts share no blocks.
    read_prefix_cache: False where every prompt position must be computed (prompt_logprobs).
    """

    id: int
    order: tuple[int, int]
    token_ids: list[int]
    num_prompt: int
    salt: bytes = b""
    read_prefix_cache: bool = True
    siblings: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    @property
    def index(self) -> int:
        """Which of the request's n sequences it is."""
        return self.order[1]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: those a step may compute."""
        return len(self.token_ids) - self.num_computed

"""Where a conversion's time goes: seconds and peak of device memory of each phase, measured on request only.

`with phase("moments"):` costs nothing unless a `PhaseClock` is recording in this thread. One that does waits for the
device where a phase begins and ends, so a recorded conversion is a little slower than another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

_active: ContextVar[PhaseClock | None] = ContextVar("phase_clock", default=None)


@dataclass
class PhaseCost:
    """seconds: without those of phases inside it. count: how often it began. Peaks in bytes, 0 without a GPU: what
    torch had allocated, and what its allocator had reserved."""

    seconds: float = 0.0
    count: int = 0
    allocated: int = 0
    reserved: int = 0


class PhaseClock:
    """Costs by phase, in the order in which phases first began."""

    def __init__(self) -> None:
        self.costs: dict[str, PhaseCost] = {}
        self._open: list[PhaseCost] = []
        self._cuda = torch.cuda.is_available()
        self._since = 0.0

    @contextmanager
    def recording(self) -> Iterator[PhaseClock]:
        """Count the phases of this thread; what is in none of them is "other"."""
        token = _active.set(self)
        try:
            with self.phase("other"):
                yield self
        finally:
            _active.reset(token)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase `name`."""
        self._turn()
        cost = self.costs.setdefault(name, PhaseCost())
        cost.count += 1
        self._open.append(cost)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def add(self, name: str, seconds: float) -> None:
        """Count what ran beside the phases, in another thread."""
        cost = self.costs.setdefault(name, PhaseCost())
        cost.seconds += seconds
        cost.count += 1

    def _turn(self) -> None:
        """Charge what was since the last turn to the innermost open phase."""
        if self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            cost = self._open[-1]
            cost.seconds += now - self._since
            if self._cuda:
                cost.allocated = max(cost.allocated, torch.cuda.max_memory_allocated())
                cost.reserved = max(cost.reserved, torch.cuda.max_memory_reserved())
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._since = now


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The block is phase `name` of the clock that is recording, if one is."""
    clock = _active.get()
    if clock is None:
        yield
        return
    with clock.phase(name):
        yield


def active_clock() -> PhaseClock | None:
    """The clock that is recording in this thread."""
    return _active.get()

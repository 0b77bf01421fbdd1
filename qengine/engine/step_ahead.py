"""Steps under way: launched one ahead of the one whose tokens are waited for, so that the device goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from qengine.engine.sampler import SampleRow
from qengine.engine.scheduler import Plan, Scheduler
from qengine.engine.sequence import Sequence
from qengine.engine.step import Launched, StepItem, StepResult, StepRunner

Touched = TypeVar("Touched")


@dataclass
class Flight:
    """A step under way. sampled: the sequences that get a token from it, in the order of its samples.

    drawn: False as long as the draw waits for the tokens of the step before.
    """

    plan: Plan
    step: Launched
    sampled: list[Sequence]
    drawn: bool


class StepAhead:
    """Launches steps and waits for them, in order.

    items: a plan as the runner takes it. row: what the sampler knows of a sequence; None if it has ended. ahead: False
    for models whose next step needs this one's tokens. runs_ahead: whether there are two steps under way at all.
    before_wait: called then in each step, when the next is launched and nothing is left to do but wait.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        items: Callable[[Plan], list[StepItem]],
        row: Callable[[Sequence], SampleRow | None],
        *,
        ahead: bool,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._items = items
        self._row = row
        self.runs_ahead = ahead and runner.overlaps
        self.before_wait: Callable[[], None] = lambda: None
        self._next: Flight | None = None

    def step(self, process: Callable[[Flight, StepResult], Touched]) -> Touched | None:
        """Give `process` the step under way, or one launched now; before that, launch the next.

        Returns what `process` does; None if there is nothing to compute.
        """
        current, self._next = self._next or self._launch(), None
        if current is None:
            return None
        self._draw(current)
        failure: BaseException | None = None
        if self.runs_ahead:
            try:
                self._next = self._launch()
            except BaseException as error:
                failure = error  # what the step under way gives is recorded first
            self.before_wait()
        touched = process(current, self._result(current))
        if failure is not None:
            raise failure
        if self._next is not None:
            self._draw(self._next)
        return touched

    def _launch(self) -> Flight | None:
        """Schedule and launch a step; None if there is nothing to compute."""
        if not self._scheduler.has_unfinished():
            return None
        plan = self._scheduler.schedule()
        if not plan.chunks and not plan.swap:
            return None
        sampled = [seq for chunk in plan.chunks if chunk.samples for seq in (chunk.seq, *chunk.forks)]
        # What bad words or a grammar look at is drawn when the tokens before are known; the rest need not wait.
        later = any(seq.num_unknown and self._needs_tokens(seq) for seq in sampled)
        try:
            step = self._runner.launch(self._items(plan), plan.copies, plan.swap, later=later)
        except BaseException:
            # Out of memory or Ctrl-C: what the cache holds now is unknown, so these are computed anew.
            self._scheduler.fail(plan)
            raise
        self._scheduler.advance(plan)
        flight = Flight(plan, step, sampled, drawn=not later)
        if flight.drawn:
            self._expect(flight)
        return flight

    def _needs_tokens(self, seq: Sequence) -> bool:
        row = self._row(seq)
        return row is not None and row.needs_tokens

    def _draw(self, flight: Flight) -> None:
        """Draw a step's tokens, if that was left for now."""
        if flight.drawn:
            return
        try:
            flight.step.draw()
        except BaseException:
            self._abandon(flight)
            raise
        flight.drawn = True
        self._expect(flight)

    def _expect(self, flight: Flight) -> None:
        for seq in flight.sampled:
            if self._row(seq) is not None:
                seq.expect()

    def _result(self, flight: Flight) -> StepResult:
        """Wait for a step."""
        try:
            result = flight.step.result()
        except BaseException:
            self._abandon(flight)
            raise
        self._scheduler.commit(flight.plan)
        return result

    def _abandon(self, flight: Flight) -> None:
        """Take back a step that failed, and the one after it: their sequences are computed anew."""
        flights = [flight] if self._next is None else [flight, self._next]
        self._next = None
        for one in flights:
            for seq in one.sampled:
                seq.forget_unknown()
        for one in flights:
            self._scheduler.fail(one.plan)

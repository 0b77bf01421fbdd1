"""Clocks around the parts of an engine's steps on a GPU: host time of each part, GPU time by events."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from qengine.engine.step import StepItem

if TYPE_CHECKING:
    from qengine.llm import LLM

HOST_PARTS = ("schedule", "items", "stage", "launch", "prepare", "sample", "wait", "commit", "process")
"""Of the host's time. launch holds stage, prepare and sample."""


@dataclass
class Step:
    """One step's numbers. prefills: sequences with several tokens. context: cached tokens of all its sequences."""

    tokens: int
    sequences: int
    prefills: int
    context: int
    kind: str = "eager"
    begin: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    end: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    host_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gpu_ms: float = 0.0
    gap_ms: float = 0.0


class Tracer:
    """Times an engine's steps by wrapping its parts, until `close`. before: called with each step's items.

    It knows the insides of Engine and GpuRunner, so that these need no clocks of their own.
    """

    def __init__(self, llm: LLM) -> None:
        engine: Any = llm.engine
        self.runner: Any = engine._runner
        self.steps: list[Step] = []
        self.before: Callable[[list[StepItem], Step], None] | None = None
        self._restore: list[Callable[[], None]] = []
        self._times: dict[str, float] = defaultdict(float)
        self._wrap(engine.scheduler, "schedule", "schedule")
        self._wrap(engine.scheduler, "commit", "commit")
        self._wrap(engine._steps, "_items", "items")
        self._wrap(engine, "_process", "process")
        self._wrap(self.runner._staging, "stage", "stage")
        self._wrap(self.runner._sampler, "prepare", "prepare")
        self._wrap(self.runner._sampler, "run", "sample")
        launch = self.runner.launch
        self._put(self.runner, "launch", lambda *args, **more: self._launch(launch, *args, **more))

    def close(self) -> None:
        """Take the clocks away."""
        for restore in self._restore:
            restore()

    def finish(self) -> None:
        """Read the events; call once the GPU is done."""
        torch.cuda.synchronize()
        for before, step in zip([None, *self.steps], self.steps, strict=False):
            step.gpu_ms = step.begin.elapsed_time(step.end)
            step.gap_ms = 0.0 if before is None else before.end.elapsed_time(step.begin)

    def _put(self, owner: Any, name: str, function: Any) -> None:
        own = vars(owner).get(name)
        self._restore.append(partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own))
        setattr(owner, name, function)

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **more)
            finally:
                self._times[part] += 1e3 * (time.perf_counter() - start)

        self._put(owner, name, timed)

    def _graphs(self) -> int:
        return len(self.runner.graph_bytes())

    def _launch(self, inner: Any, items: list[StepItem], *args: Any, **more: Any) -> Any:
        if not items:
            return inner(items, *args, **more)
        counts = [item.end - item.start for item in items]
        step = Step(sum(counts), len(items), sum(n > 1 for n in counts), sum(item.end for item in items))
        if self.before is not None:
            self.before(items, step)
        step.host_ms = self._times
        graphs, replayed = self._graphs(), list[Any]()
        replay, stage = self.runner._replay, self.runner._staging.stage

        def staged(*inputs: Any) -> Any:
            found = stage(*inputs)
            step.begin.record(self.runner._stream)
            return found

        def replayed_by(rows: list[StepItem]) -> Any:
            replayed.append(replay(rows))
            return replayed[-1]

        self.runner._replay = replayed_by
        self.runner._staging.stage = staged
        start = time.perf_counter()
        try:
            launched = inner(items, *args, **more)
        finally:
            del self.runner._replay
            self.runner._staging.stage = stage
        step.end.record(self.runner._stream)
        step.host_ms["launch"] += 1e3 * (time.perf_counter() - start)
        if replayed and replayed[-1] is not None:
            step.kind = "mixed" if step.prefills else "decode"
        if self._graphs() > graphs:
            step.kind = "capture"
        self.steps.append(step)
        self._times = defaultdict(float)
        self._time_result(launched, step)
        return launched

    def _time_result(self, launched: Any, step: Step) -> None:
        inner = launched.result

        def result() -> Any:
            start = time.perf_counter()
            try:
                return inner()
            finally:
                step.host_ms["wait"] += 1e3 * (time.perf_counter() - start)

        launched.result = result


def summary(steps: list[Step]) -> dict[str, dict[str, float]]:
    """Kind -> count and means of its steps."""
    found = {}
    for kind in ("decode", "mixed", "eager", "capture"):
        own = [step for step in steps if step.kind == kind]
        if not own:
            continue
        row = {
            "steps": len(own),
            "tokens": statistics.mean(s.tokens for s in own),
            "sequences": statistics.mean(s.sequences for s in own),
            "prefills": statistics.mean(s.prefills for s in own),
            "context": statistics.mean(s.context for s in own),
            "gpu_s": sum(s.gpu_ms for s in own) / 1e3,
            "gap_s": sum(s.gap_ms for s in own) / 1e3,
            "gpu_ms": statistics.mean(s.gpu_ms for s in own),
            "gap_ms": statistics.mean(s.gap_ms for s in own),
        }
        row |= {part: statistics.mean(s.host_ms.get(part, 0.0) for s in own) for part in HOST_PARTS}
        found[kind] = row
    return found

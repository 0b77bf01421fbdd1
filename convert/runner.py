"""Runs the calibration data through one decoder layer at a time, beside the unquantized model's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from qengine.convert.activations import Activations
from qengine.convert.phases import phase
from qengine.convert.precision import tensor_cores
from qengine.convert.stats import InputStats, SplitStats
from qengine.layers.attention import DenseContext
from qengine.models import DecoderLayer

BATCH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 28}

Hook = Callable[[torch.Tensor], None]


class _Enough(Exception):
    """Raised by an observer once it has seen what it came for: the rest of the layer need not run."""


class CalibrationRunner:
    """Takes the calibration windows through layers, batch by batch: `states` through the quantized model, `reference`
    through the source.

    `observe` runs layers without keeping their outputs, `advance` replaces the states by them. widest: the most
    columns that an activation inside a layer has; it decides how many windows a batch holds. hold_out: share of the
    windows, the last ones, whose rows are kept apart in the statistics. before_writing: called by `advance` before it
    changes any states.
    """

    def __init__(self, states: Activations, reference: Activations, widest: int, hold_out: float = 0.0) -> None:
        self.states = states
        self.hold_out = hold_out
        self.reference = reference
        self.device = states.device
        self.before_writing: Callable[[], None] = lambda: None
        row_bytes = 4 * widest * states.shape[1]
        self._batch = max(1, BATCH_BYTES.get(self.device.type, BATCH_BYTES["cpu"]) // row_bytes)

    @property
    def samples(self) -> int:
        """Windows that are left; those with inf or NaN are dropped."""
        return len(self.states)

    @property
    def one_batch(self) -> bool:
        """Whether a single batch holds all windows, so that a hook sees all of a linear's inputs at once."""
        return 0 < self.samples <= self._batch

    def _starts(self) -> range:
        return range(0, self.samples, self._batch)

    @torch.no_grad()
    def inputs(self, layer: DecoderLayer, states: Activations, start: int, names: Sequence[str]) -> list[torch.Tensor]:
        """What the named linears, given in the order they run, see for one batch from `start`; the rest is not run."""
        seen: list[torch.Tensor] = []

        def keep(x: torch.Tensor) -> None:
            seen.append(x)

        def stop(x: torch.Tensor) -> None:
            seen.append(x)
            raise _Enough

        hooks: dict[str, Hook] = dict.fromkeys(names, keep)
        hooks[names[-1]] = stop
        with _hooked(layer, hooks), suppress(_Enough):
            self._run(layer, states, start)
        return seen

    @torch.no_grad()
    def observe_source(self, source: DecoderLayer, names: Sequence[str]) -> dict[str, InputStats]:
        """Statistics of the named linears' inputs in the source."""
        stats = {name: InputStats() for name in names}
        for start in self._starts():
            for name, x in zip(names, self.inputs(source, self.reference, start, names), strict=True):
                stats[name](x)
        return stats

    @torch.no_grad()
    def observe(self, layer: DecoderLayer, source: DecoderLayer, name: str) -> SplitStats:
        """Statistics of one linear's input in the quantized model, beside its input in the source."""
        stats = self.new_stats()
        for start in self._starts():
            reference = self.inputs(source, self.reference, start, [name])[0]
            stats.add(self.inputs(layer, self.states, start, [name])[0], reference, self.fit_rows(start))
        return stats

    def new_stats(self) -> SplitStats:
        """Empty ones, with held-out rows where there are any."""
        return SplitStats(self._held() > 0)

    def fit_rows(self, start: int) -> int:
        """How many rows of the batch from window `start` are fitted."""
        return max(0, self.samples - self._held() - start) * self.states.shape[1]

    def _held(self) -> int:
        return max(1, round(self.samples * self.hold_out)) if self.hold_out and self.samples > 1 else 0

    @torch.no_grad()
    def advance(
        self,
        layer: DecoderLayer,
        source: DecoderLayer,
        hooks: Mapping[str, Hook] | None = None,
        source_hooks: Mapping[str, Hook] | None = None,
    ) -> tuple[int, float | None]:
        """Replace the states by the layers' outputs. Returns how many windows were dropped for inf or NaN, and the
        squared distance of the two models' outputs relative to the source's, None with nothing left to compare.

        hooks: linear name -> what to call with its input in `layer` before it runs; it may replace the weight.
        source_hooks: the same for `source`, which sees a batch first.
        """
        bad: list[int] = []
        distance, size = 0.0, 0.0
        for start in self._starts():
            with _hooked(source, source_hooks or {}):
                expected = self._run(source, self.reference, start)
            with _hooked(layer, hooks or {}):
                outputs = self._run(layer, self.states, start)
            finite = torch.isfinite(outputs).flatten(1).all(dim=1) & torch.isfinite(expected).flatten(1).all(dim=1)
            bad += [start + place for place, good in enumerate(finite.tolist()) if not good]
            distance += float((outputs[finite] - expected[finite]).square().sum(dtype=torch.float64))
            size += float(expected[finite].square().sum(dtype=torch.float64))
            if start == 0:
                self.before_writing()
            with phase("states"):
                self.states.write(start, outputs)
                self.reference.write(start, expected)
        self.states.drop(bad)
        self.reference.drop(bad)
        return len(bad), distance / size if size > 0 else None

    def _run(self, layer: DecoderLayer, states: Activations, start: int) -> torch.Tensor:
        with phase("states"):
            windows = states.read(start, start + self._batch)
        batch, length, width = windows.shape
        positions = torch.arange(length, device=self.device).repeat(batch)
        rows = windows.reshape(batch * length, width)
        with phase("forward"), tensor_cores(self.device):
            return layer(rows, positions, DenseContext(batch, length)).reshape(batch, length, width)


def twin(layer: DecoderLayer) -> DecoderLayer:
    """A second layer. Its linears have the same weights in the same memory, until `set_weight` gives them others."""
    weights = [linear.dense_weight() for linear in layer.linears().values()]
    return copy.deepcopy(layer, {id(weight): weight for weight in weights if weight is not None})


@contextmanager
def _hooked(layer: DecoderLayer, hooks: Mapping[str, Hook]) -> Iterator[None]:
    linears = layer.linears()
    for name, hook in hooks.items():
        linears[name].observer = hook
    try:
        yield
    finally:
        for name in hooks:
            linears[name].observer = None

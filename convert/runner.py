"""Runs the calibration data through one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from qengine.convert.stats import InputStats
from qengine.layers.attention import DenseContext
from qengine.models import DecoderLayer

BATCH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
PREVIEW_WINDOWS = 2

Hook = Callable[[torch.Tensor], None]


class _Enough(Exception):
    """Raised by an observer once it has seen what it came for: the rest of the layer need not run."""


class CalibrationRunner:
    """Owns the calibration windows' hidden states: float32 [S, L, H] on the host, moved to the device batch by batch.

    `observe` runs a layer without keeping its outputs, `advance` replaces the hidden states by them. widest: the most
    columns that an activation inside a layer has; it decides how many windows a batch holds.
    """

    def __init__(self, hidden: torch.Tensor, device: torch.device, widest: int) -> None:
        self.hidden = hidden
        self.device = device
        row_bytes = 4 * widest * hidden.shape[1]
        self._batch = max(1, BATCH_BYTES.get(device.type, BATCH_BYTES["cpu"]) // row_bytes)

    @property
    def samples(self) -> int:
        """Windows that are left; those with inf or NaN are dropped."""
        return self.hidden.shape[0]

    @property
    def one_batch(self) -> bool:
        """Whether a single batch holds all windows, so that a hook sees all of a linear's inputs at once."""
        return 0 < self.samples <= self._batch

    @torch.no_grad()
    def observe(self, layer: DecoderLayer, names: Iterable[str]) -> dict[str, InputStats]:
        """Statistics of the inputs of the named linears, given in the order they run; what comes later is not run."""
        names = list(names)
        stats = {name: InputStats() for name in names}
        hooks: dict[str, Hook] = dict(stats)
        last = stats[names[-1]]

        def stop(x: torch.Tensor) -> None:
            last(x)
            raise _Enough

        hooks[names[-1]] = stop
        with _hooked(layer, hooks):
            for start in range(0, self.samples, self._batch):
                with suppress(_Enough):
                    self._run(layer, self.hidden[start : start + self._batch])
        return stats

    @torch.no_grad()
    def preview(self, layer: DecoderLayer) -> torch.Tensor | None:
        """The layer's outputs for the first windows, None when none are left."""
        return self._run(layer, self.hidden[:PREVIEW_WINDOWS]) if self.samples else None

    @torch.no_grad()
    def advance(self, layer: DecoderLayer, hooks: Mapping[str, Hook] | None = None) -> int:
        """Replace the hidden states by the layer's outputs; returns how many windows were dropped for inf or NaN.

        hooks: linear name -> what to call with its input before it runs; it may replace the linear's weight.
        """
        with _hooked(layer, hooks or {}):
            for start in range(0, self.samples, self._batch):
                part = slice(start, start + self._batch)
                self.hidden[part] = self._run(layer, self.hidden[part]).to(self.hidden.device)
        finite = torch.isfinite(self.hidden).flatten(1).all(dim=1)
        dropped = int((~finite).sum())
        if dropped:
            self.hidden = self.hidden[finite].clone()
        return dropped

    def _run(self, layer: DecoderLayer, windows: torch.Tensor) -> torch.Tensor:
        batch, length, width = windows.shape
        positions = torch.arange(length, device=self.device).repeat(batch)
        rows = windows.reshape(batch * length, width).to(self.device)
        return layer(rows, positions, DenseContext(batch, length)).reshape(batch, length, width)


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


def relative_error(got: torch.Tensor | None, expected: torch.Tensor | None) -> float | None:
    """Mean squared difference over mean square; None where there is nothing finite to compare."""
    if got is None or expected is None:
        return None
    value = float((got - expected).square().sum() / expected.square().sum().clamp_min(1e-30))
    return value if value == value and value != float("inf") else None

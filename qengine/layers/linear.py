"""A linear layer whose weight may be quantized, and the choice of what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from qengine.errors import UnsupportedError
from qengine.layers.activation import GatedActivation
from qengine.layers.linear_dense import DenseLinear
from qengine.layers.linear_fp16 import Fp16PackedLinear
from qengine.layers.linear_impl import LinearCase, LinearImpl
from qengine.layers.linear_int4 import CpuInt4Linear
from qengine.layers.linear_packed import DequantizePerCall
from qengine.layers.linear_w4a16 import PAIRED_ROWS, FusedGatedLinear, FusedLinear
from qengine.quant import LinearWeight, PlainWeight

Split = Literal["replicated", "columns", "rows"]

CANDIDATES: tuple[type[LinearImpl], ...] = (
    FusedLinear,
    CpuInt4Linear,
    Fp16PackedLinear,
    DequantizePerCall,
    DenseLinear,
)
"""Implementations, best first: the first one without an objection is taken."""


def choose(case: LinearCase, candidates: tuple[type[LinearImpl], ...] = CANDIDATES) -> type[LinearImpl]:
    """The first implementation that can serve `case`. Raises UnsupportedError with every objection if none can."""
    objections = []
    for candidate in candidates:
        reason = candidate.why_not(case)
        if reason is None:
            return candidate
        objections.append(f"{candidate.name}: {reason}")
    raise UnsupportedError(f"no implementation for a linear layer {case}: {'; '.join(objections)}")


class Linear:
    """y = x W^T + bias for x [T, K] in `dtype`; y [T, N].

    name: as in the checkpoint. split: how tensor parallelism divides the weight: "columns" of the output, "rows" of
    the input, or not at all; information for a loader, nothing here depends on it. observer: called with every input
    while it is set (calibration). gate: the weight has the rows of a gate and then those of what it gates, and the
    result is act(gate) * up, [T, N / 2]. Raises UnsupportedError if no implementation can serve the weight.
    """

    def __init__(
        self,
        name: str,
        weight: LinearWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        split: Split = "replicated",
        gate: GatedActivation | None = None,
    ) -> None:
        self.name = name
        self.gate = gate
        self.dtype = dtype
        self.device = device
        self.split = split
        self.observer: Callable[[torch.Tensor], None] | None = None
        self._impl = self._build(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, K] -> y [T, N], or [T, N / 2] with a gate."""
        if self.observer is not None:
            self.observer(x)
        y = self._impl(x)
        return y if self.gate is None or self._impl.gated else self.gate.joined(y)

    def _build(self, weight: LinearWeight) -> LinearImpl:
        case = LinearCase.of(weight, self.dtype, self.device)
        try:
            chosen = choose(case)
            if chosen is FusedLinear and self.gate is not None and case.shape[0] % PAIRED_ROWS == 0:
                return FusedGatedLinear(weight, self.dtype, self.device, self.gate.name)
            return chosen(weight, self.dtype, self.device)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}: {error}") from None

    def set_weight(self, weight: torch.Tensor | LinearWeight) -> None:
        """Replace the weight. A bare tensor [N, K] keeps the bias."""
        if isinstance(weight, torch.Tensor):
            weight = PlainWeight(weight, self._impl.bias)
        rows, columns = weight.weight.shape if isinstance(weight, PlainWeight) else weight.shape
        if (rows, columns) != self.shape:
            raise ValueError(f"{self.name}: a weight {[rows, columns]} cannot replace one of {list(self.shape)}")
        self._impl = self._build(weight)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._impl.shape

    @property
    def implementation(self) -> type[LinearImpl]:
        """What computes it."""
        return type(self._impl)

    def describe(self) -> str:
        """One line for people: what computes this layer and on what weights."""
        return self._impl.describe()

    def dense_weight(self) -> torch.Tensor | None:
        """The weight [N, K] in the compute dtype, if it is held that way; shared, not copied."""
        return self._impl.weight if isinstance(self._impl, DenseLinear) else None

    def nbytes(self) -> int:
        """Bytes that weight and bias take."""
        return self._impl.nbytes()

"""One decoder layer's matrices on the way from the source to the file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qengine.quant.weights import QuantizedWeight


@dataclass
class LinearRecord:
    """What happened to one linear: the report's row.

    error and rtn_error: mean squared distance of the outputs, as rounded and as round-to-nearest would have them, from
    those of the best weight in full precision (see correction.py), over the outputs' mean square, on the calibration
    data; None where no usable data was seen. weight_error: the change of the weights themselves over their squares,
    scales taken out.
    """

    name: str
    method: str
    bits: int
    group_size: int
    weight_error: float | None = None
    error: float | None = None
    rtn_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass
class LayerResult:
    """The outcome for one layer; names are relative to it.

    quantized: W' = W * columns / rows, rounded. columns [K]: what each linear's input was divided by. rows [N]: what
    its outputs are divided by in the file. Both are absent where they are 1. norms: new (weight, bias) of norms
    that took a division up. warnings: for the user.
    """

    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    records: list[LinearRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_file(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [N, K] with the layer's scales applied: what is rounded, or stored as it is."""
        if name in self.columns:
            weight = weight * self.columns[name]
        if name in self.rows:
            weight = weight / self.rows[name][:, None]
        return weight

    def effective(self, name: str) -> torch.Tensor:
        """The rounded weight [N, K] float32 with the scales taken out: it acts on the source's own activations."""
        return self.taken_out(name, self.quantized[name])

    def taken_out(self, name: str, quantized: QuantizedWeight) -> torch.Tensor:
        """The same of a weight that is not chosen yet."""
        weight = quantized.dequantize(torch.float32)
        if name in self.columns:
            weight = weight / self.columns[name]
        if name in self.rows:
            weight = weight * self.rows[name][:, None]
        return weight

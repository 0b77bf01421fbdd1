"""The plain way: the weight in the compute dtype, dequantized once while loading."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qengine.layers.linear_impl import LinearCase, LinearImpl, dense, size_of, weight_shape
from qengine.quant import LinearWeight, PlainWeight


class DenseLinear(LinearImpl):
    """torch's own matrix product on the whole weight."""

    name = "dense"

    @staticmethod
    def why_not(case: LinearCase) -> str | None:
        """Plain weights go anywhere; quantized ones are not blown up in a GPU's memory."""
        if case.quant is not None and case.device.type != "cpu":
            return f"a quantized weight stays packed on {case.device.type}"
        return None

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = weight_shape(weight)
        self._quantized = not isinstance(weight, PlainWeight)
        self.weight = dense(weight, dtype).to(device).contiguous()
        self.bias = None if weight.bias is None else weight.bias.to(device, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl."""
        return F.linear(x, self.weight, self.bias)

    def describe(self) -> str:
        """See LinearImpl."""
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return f"dense {dtype}, dequantized while loading" if self._quantized else f"dense {dtype}"

    def nbytes(self) -> int:
        """See LinearImpl."""
        return size_of(self.weight, self.bias)

"""Weights that stay packed and are dequantized for each call: the reference on devices whose memory is scarce."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qengine.layers.linear_impl import LinearCase, LinearImpl, size_of
from qengine.quant import LinearWeight, QuantizedWeight


class DequantizePerCall(LinearImpl):
    """Two codes a byte up to 4 bits, one above. A call takes N * K values of scratch memory in the compute dtype."""

    name = "dequantize-per-call"

    @staticmethod
    def why_not(case: LinearCase) -> str | None:
        """Quantized weights on a GPU; on a CPU dequantizing once is faster."""
        if case.quant is None:
            return "the weight is not quantized"
        if case.device.type == "cpu":
            return "on a CPU dequantizing once is faster"
        return None

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        assert isinstance(weight, QuantizedWeight), "why_not refuses plain weights"
        self.shape = weight.shape
        self.dtype = dtype
        self.bias = None if weight.bias is None else weight.bias.to(device, dtype)
        self._nibbles = weight.spec.bits <= 4
        self._codes = _pack_nibbles(weight.q).to(device) if self._nibbles else weight.q.to(device).contiguous()
        self._scales = weight.scales.to(device)
        self._zeros = weight.zeros.to(device)
        self._groups = weight.group_index().to(device)
        self._regular = weight.g_idx is None and self.shape[1] == weight.group_size * weight.scales.shape[1]
        self._description = f"{weight.spec.bits}-bit weights, dequantized for each call (reference)"

    def dequantize(self) -> torch.Tensor:
        """W [N, K] in the compute dtype, the same numbers as QuantizedWeight.dequantize."""
        rows, columns = self.shape
        q = _unpack_nibbles(self._codes, columns) if self._nibbles else self._codes
        # A difference of codes is exact in 16 bits, so a product in the scales' dtype rounds once, like a wider one.
        if self._regular:
            groups = self._scales.shape[1]
            offset = q.view(rows, groups, columns // groups) - self._zeros[:, :, None]
            return (offset.to(self._scales.dtype) * self._scales[:, :, None]).view(rows, columns).to(self.dtype)
        offset = q - self._zeros.index_select(1, self._groups)
        return (offset.to(self._scales.dtype) * self._scales.index_select(1, self._groups)).to(self.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl."""
        return F.linear(x, self.dequantize(), self.bias)

    def describe(self) -> str:
        """See LinearImpl."""
        return self._description

    def nbytes(self) -> int:
        """See LinearImpl."""
        return size_of(self._codes, self._scales, self._zeros, self._groups, self.bias)


def _pack_nibbles(q: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ceil(K/2)]: even columns in the low half."""
    if q.shape[1] % 2:
        q = F.pad(q, (0, 1))
    return q[:, 0::2] | (q[:, 1::2] << 4)


def _unpack_nibbles(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """uint8 [N, columns]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1)[:, :columns]

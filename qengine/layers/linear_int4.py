"""torch's INT4 matrix product for CPUs.

The kernel computes x V^T with V[n, k] = (q[n, k] - 8) * scale[g, n] + zero[g, n]. With zero = (8 - z) * scale in
float32 V is (q - z) * scale: (q - 8) * scale has at most 4 + 11 bits, so neither product rounds, and the sum is exact.
QuantizedWeight.dequantize rounds that to the scales' dtype, so both agree wherever the product fits in it.

On x86 torch has vector code for bfloat16 inputs only; float32 goes value by value, many times slower than the dense
product (seen with torch 2.13 on AVX2). On ARM all dtypes have vector code. In bfloat16, scale and zero are rounded. On
bfloat16 inputs the kernel was faster than torch's product with a dense bfloat16 weight at every size from 1 row to 256,
so prompts go through it too.
"""

from __future__ import annotations

import platform

import torch

from qengine.layers.linear_impl import LinearCase, LinearImpl, size_of
from qengine.quant import LinearWeight, QuantizedWeight

GROUP_SIZES = (32, 64, 128, 256)
ROW_MULTIPLE = 16


class CpuInt4Linear(LinearImpl):
    """4-bit weights in torch's own packed form; columns out of group order are sorted once and the input gathered."""

    name = "cpu-int4"

    @staticmethod
    def why_not(case: LinearCase) -> str | None:
        """4 bits, a group size and shape the kernel knows, and inputs it has vector code for."""
        if case.device.type != "cpu":
            return "for CPUs only"
        if case.quant is None:
            return "the weight is not quantized"
        if case.quant.bits != 4:
            return f"takes 4 bits, not {case.quant.bits}"
        rows, columns = case.shape
        group = case.quant.group_size if case.quant.group_size > 0 else columns
        if group not in GROUP_SIZES:
            return f"takes groups of {', '.join(map(str, GROUP_SIZES))}, not {group}"
        if columns % group:
            return f"in_features={columns} must be a multiple of group_size={group}"
        if rows % ROW_MULTIPLE:
            return f"out_features={rows} must be a multiple of {ROW_MULTIPLE}"
        if not case.sorted_groups:
            return "the groups have unequal numbers of columns"
        if case.dtype != torch.bfloat16 and platform.machine().lower() in ("x86_64", "amd64"):
            return f"torch has vector code for bfloat16 inputs only on x86, not {case.dtype}"
        return None

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        assert isinstance(weight, QuantizedWeight), "why_not refuses plain weights"
        self.shape = weight.shape
        self.bias = None if weight.bias is None else weight.bias.to(dtype)
        self._group = weight.group_size
        q, self._order = weight.q, None
        if weight.g_idx is not None:
            order = torch.argsort(weight.g_idx, stable=True)
            if not torch.equal(order, torch.arange(len(order))):
                q, self._order = q[:, order], order
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.to(torch.int32).contiguous(), 1)
        scales = weight.scales.float()
        zeros = (8 - weight.zeros.float()) * scales
        self._scales = torch.stack((scales.t(), zeros.t()), dim=-1).to(dtype).contiguous()
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        y = self._run(x.contiguous(), self._packed, self._group, self._scales)
        return y if self.bias is None else y + self.bias

    def describe(self) -> str:
        """See LinearImpl."""
        order = ", input gathered (act-order)" if self._order is not None else ""
        return f"torch INT4 CPU kernel, group {self._group}{order}"

    def nbytes(self) -> int:
        """See LinearImpl."""
        return size_of(self._packed, self._scales, self._order, self.bias)

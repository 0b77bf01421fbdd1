"""Quantized weights on a GPU: packed INT4 or INT8, unpacked inside the matrix product (`kernels/w4a16`)."""

from __future__ import annotations

import torch

from qengine.layers.join import reorder_rows
from qengine.layers.kept_memory import keep
from qengine.layers.linear_impl import LinearCase, LinearImpl, size_of, weight_shape
from qengine.quant import LinearWeight, QuantizedWeight

ROW_MULTIPLE = 8
GROUP_MULTIPLE = 16
PAIRED_ROWS = 16
"""Rows of gate and up that the kernel takes together: eight of each."""


class FusedLinear(LinearImpl):
    """2 to 4 bits are held in 4, 5 to 8 in 8; act-order columns are sorted once and gathered inside the product."""

    name = "w4a16"

    @staticmethod
    def why_not(case: LinearCase) -> str | None:
        """Float16 or bfloat16 inputs on a CUDA device; sizes in eights and groups in sixteens."""
        if case.device.type != "cuda":
            return "for CUDA devices only"
        if case.quant is None:
            return "the weight is not quantized"
        if case.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 or bfloat16 inputs, not {case.dtype}"
        if any(size % ROW_MULTIPLE for size in case.shape):
            return f"out_features and in_features must be multiples of {ROW_MULTIPLE}, not {case.shape}"
        group = case.quant.group_size
        if 0 < group < case.shape[1] and group % GROUP_MULTIPLE:
            return f"takes groups that are multiples of {GROUP_MULTIPLE} or one group for all columns, not {group}"
        return None

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        # Triton is imported where a kernel is wanted, so that a CPU-only machine does without it.
        from qengine.kernels.w4a16 import W4A16Weight, w4a16_linear

        assert isinstance(weight, QuantizedWeight), "why_not refuses plain weights"
        self.shape = weight.shape
        self.bias = None if weight.bias is None else weight.bias.to(device, dtype)
        packed = W4A16Weight.pack(
            weight.q,
            weight.scales,
            weight.zeros,
            weight.g_idx,
            weight.spec.bits,
            weight.spec.group_size,
            device,
            dtype,
        )
        self._weight = packed.map(keep)
        self._run = w4a16_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl."""
        return self._run(x, self._weight, self.bias)

    def describe(self) -> str:
        """See LinearImpl."""
        order = ", act-order" if self._weight.perm is not None else ""
        return f"fused Triton kernel, {self._weight.bits}-bit weights{order}"

    def nbytes(self) -> int:
        """See LinearImpl."""
        return self._weight.nbytes() + size_of(self.bias)


class FusedGatedLinear(FusedLinear):
    """act(gate) * up [T, N / 2] of a weight with the rows of gate and then those of up, in one kernel."""

    gated = True

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device, activation: str) -> None:
        from qengine.kernels.w4a16 import paired_rows, w4a16_gated

        size = weight_shape(weight)[0] // 2
        super().__init__(reorder_rows(weight, paired_rows(size)), dtype, device)
        # `bias` stays in the order that the layer's user knows, for `Linear.set_weight`
        self._paired_bias = self.bias
        self.bias = None if weight.bias is None else weight.bias.to(device, dtype)
        self._gated = w4a16_gated
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl; the result is [T, N / 2]."""
        return self._gated(x, self._weight, self._paired_bias, self._activation)

    def describe(self) -> str:
        """See LinearImpl."""
        return f"{super().describe()}, {self._activation}(gate) * up"

    def nbytes(self) -> int:
        """See LinearImpl."""
        return super().nbytes() + size_of(self._paired_bias)

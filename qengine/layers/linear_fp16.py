"""float32 arithmetic on float16 weights: FBGEMM's packed product, which torch carries for x86.

At small batches a linear layer's time is the time to read its weight, and these are half as large as float32. The
result is as exact as float32 weights give: every float16 is a float32, and products and sums are float32.
"""

from __future__ import annotations

import platform

import torch

from qengine.layers.linear_impl import LinearCase, LinearImpl, dense, weight_shape
from qengine.quant import LinearWeight


class Fp16PackedLinear(LinearImpl):
    """For weights whose (dequantized) values are float16 numbers, as all with float16 scales are."""

    name = "cpu-fp16-packed"

    @staticmethod
    def why_not(case: LinearCase) -> str | None:
        """On x86 CPUs, for float32 inputs and weights that float16 holds exactly."""
        if case.device.type != "cpu":
            return "for CPUs only"
        if case.dtype != torch.float32:
            return f"computes in float32, not {case.dtype}"
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"FBGEMM is for x86 with AVX2, this is {platform.machine()}"
        capability = torch.backends.cpu.get_cpu_capability()
        if not capability.startswith(("AVX2", "AVX512")):
            return f"needs AVX2, this CPU runs torch's {capability} code"
        if torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return f"torch's quantized engine is {torch.backends.quantized.engine}, not x86 or fbgemm"
        if case.fp16_exact is False:
            return "some values are not exact in float16"
        return None

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = weight_shape(weight)
        self.bias = None if weight.bias is None else weight.bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(dense(weight, torch.float32).contiguous(), self.bias)
        self._run = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearImpl."""
        return self._run(x, self._packed)

    def describe(self) -> str:
        """See LinearImpl."""
        return "float16 weights, float32 arithmetic (FBGEMM)"

    def nbytes(self) -> int:
        """See LinearImpl."""
        rows, columns = self.shape
        return 2 * rows * columns + (0 if self.bias is None else self.bias.nbytes)

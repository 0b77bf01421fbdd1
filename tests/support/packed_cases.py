"""Random quantized layers and their exact products, for the tests of the packed GEMM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.kernels.w4a16 import W4A16Weight


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    m: int
    bits: int = 4
    group: int = 128
    act_order: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        extra = ("-act" if self.act_order else "") + ("-bias" if self.bias else "")
        return f"{self.n}x{self.k}-m{self.m}-w{self.bits}-g{self.group}{extra}-{str(self.dtype)[6:]}"


def make(case: Case, device: str = "cpu") -> tuple[torch.Tensor, W4A16Weight, torch.Tensor | None, torch.Tensor]:
    """(x, packed weight, bias, exact y in float64) from fresh random numbers."""
    size = case.group if 0 < case.group < case.k else case.k
    groups = -(-case.k // size)
    q = torch.randint(0, 2**case.bits, (case.n, case.k), dtype=torch.uint8)
    zeros = torch.randint(0, 2**case.bits + 1, (case.n, groups), dtype=torch.int16)
    scales = ((torch.rand(case.n, groups) - 0.3) * 0.03).half()
    index = torch.arange(case.k) // size
    g_idx = index[torch.randperm(case.k)].int() if case.act_order else None
    weight = W4A16Weight.pack(q, scales, zeros, g_idx, case.bits, case.group, device, case.dtype)
    index = index if g_idx is None else g_idx.long()
    plain = (q.double() - zeros.double()[:, index]) * scales.double()[:, index]
    x = torch.randn(case.m, case.k).to(case.dtype)
    bias = torch.randn(case.n).to(case.dtype) if case.bias else None
    y = x.double() @ plain.T + (0 if bias is None else bias.double())
    return x.to(device), weight, None if bias is None else bias.to(device), y


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    value = float((got.double().cpu() - exact).norm() / exact.norm())
    return value if value == value else float("inf")


TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}

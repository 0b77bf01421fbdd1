"""Cases of the fused kernels and what they must give, computed in float64 and rounded where the kernels say they round.

Every matrix is a slice of a wider one whose other columns are nan: what reads or writes beside its row is seen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ULP = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-21}
_seeds = itertools.count(1)


@dataclass(frozen=True)
class NormCase:
    """form: "norm", "add", "norm_add" or "norm_add_norm". delta None: as stream. scale: of hidden's values."""

    form: str
    rows: int
    size: int
    stream: torch.dtype = F16
    weight: torch.dtype | None = F16
    out: torch.dtype = F16
    delta: torch.dtype | None = None
    kind: str = "rms"
    bias: bool = False
    second: bool = False
    scale: float = 1.0

    def __str__(self) -> str:
        names = [str(t)[6:] for t in (self.stream, self.delta or self.stream, self.weight, self.out) if t]
        extra = [n for n in ("bias", "second") if getattr(self, n)]
        return "-".join([self.form, self.kind, f"{self.rows}x{self.size}", *names, *extra])


NORMS = [
    NormCase("norm", 3, 64),
    NormCase("norm", 1, 3),
    NormCase("norm", 2, 576, weight=F32, scale=100.0),
    NormCase("norm", 2, 1000, F32, F32, F16, scale=7e4),
    NormCase("norm", 2, 100, weight=None, kind="layer"),
    NormCase("norm", 2, 130, bias=True, kind="layer"),
    NormCase("norm", 2, 200, F32, F16, F16),
    NormCase("norm", 2, 72, F16, F16, F32),
    NormCase("add", 5, 576),
    NormCase("add", 2, 257, F32, F32, F16, delta=F16, second=True, scale=7e4),
    NormCase("add", 3, 320, kind="layer", bias=True, second=True),
    NormCase("add", 2, 96, BF16, BF16, BF16),
    NormCase("add", 2, 96, F16, F32, BF16, delta=F32),
    NormCase("norm_add", 3, 200),
    NormCase("norm_add_norm", 2, 200, F16, F32, F16),
    NormCase("norm_add", 2, 72, F32, F32, F32, delta=F16),
    NormCase("norm_add_norm", 2, 640, F32, F32, F16, delta=F16, scale=7e4),
    NormCase("norm_add_norm", 3, 257),
]


def matrix(rows: int, size: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    """Fresh random [rows, size] within a matrix that is nan elsewhere."""
    generator = torch.Generator().manual_seed(next(_seeds))
    wide = torch.full((rows, size + 16), float("nan"))
    wide[:, 8 : 8 + size] = torch.randn(rows, size, generator=generator) * scale
    return wide.to(dtype).to(device)[:, 8 : 8 + size]


def beside(x: torch.Tensor) -> torch.Tensor:
    """Whether the columns around a `matrix` are still nan."""
    base = x._base if x._base is not None else x
    whole = base.clone()
    whole[:, 8 : 8 + x.shape[1]] = float("nan")
    return whole.isnan().all()


def normed(x, w, b, eps: float, kind: str, out: torch.dtype) -> torch.Tensor:
    """The norm in float64, x and the result rounded to w's dtype."""
    dtype = x.dtype if w is None else w.dtype
    x = x.to(dtype).double()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if w is None else y * w.double()
    y = y if b is None else y + b.double()
    return y.to(dtype).to(out)


@dataclass
class Made:
    """A case's tensors, and what hidden and out must be."""

    hidden: torch.Tensor
    delta: torch.Tensor | None
    second: torch.Tensor | None
    inner: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    inner_eps: float
    want_hidden: torch.Tensor
    want: torch.Tensor | None


def make_norm(case: NormCase, device: str = "cpu") -> Made:
    """Fresh tensors of a case."""

    def vector(dtype: torch.dtype) -> torch.Tensor:
        return (matrix(1, case.size, F32, device)[0] * 0.3 + 1).to(dtype).contiguous()

    hidden = matrix(case.rows, case.size, case.stream, device, case.scale)
    delta = None if case.form == "norm" else matrix(case.rows, case.size, case.delta or case.stream, device)
    second = matrix(case.rows, case.size, case.delta or case.stream, device) if case.second else None
    inner = vector(case.weight or case.stream) if case.form.startswith("norm_add") else None
    weight = None if case.weight is None else vector(case.weight)
    bias = vector(case.weight or case.stream) if case.bias else None
    eps, inner_eps = 1e-5, 1e-3
    total = hidden.clone()
    if delta is not None:
        d = delta if inner is None else normed(delta, inner, None, inner_eps, "rms", case.stream)
        total = (total.double() + d.double()).to(case.stream)
    if second is not None:
        total = (total.double() + second.double()).to(case.stream)
    want = None if case.form == "norm_add" else normed(total, weight, bias, eps, case.kind, case.out)
    return Made(hidden, delta, second, inner, weight, bias, eps, inner_eps, total, want)


def wrong(got: torch.Tensor, want: torch.Tensor, *, ulps: float = 1.0, share: float = 0.02) -> str:
    """What is amiss, or "": a value off by more than `ulps` units (of it plus 1), or a larger share than `share` off.

    float32 is judged by the first alone. share: what float32 arithmetic may turn at the edge of two roundings; a
    value of hidden that is turned moves the norm of a short row a little, and so turns others.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    unit = ULP[want.dtype]
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    off = (a - b).abs()
    bad = ~same & ~(off <= ulps * unit * (b.abs() + 1))
    if bad.any():
        first = bad.flatten().nonzero()[0].item()
        return f"{int(bad.sum())} values off, the first {a.flatten()[first]:.8g} instead of {b.flatten()[first]:.8g}"
    turned = float((~same).double().mean())
    if want.dtype != F32 and turned > max(share, 2.5 / max(want.numel(), 1)):
        return f"{turned:.2%} of the values are rounded otherwise"
    return ""


def gates(rows: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Gates over the whole range that matters, the extremes included."""
    x = matrix(rows, size, dtype, device, 4.0)
    top = torch.finfo(F16).max
    ends = torch.tensor([0.0, -0.0, top, -top, 1e-4, -1e-4, 30.0, -30.0], dtype=F32).to(dtype)
    x[0, : min(8, size)] = ends[: min(8, size)].to(device)
    return x


def angles_want(positions, inverse, factor: float, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 cosines and signed sines [T, R] of the float32 angles."""
    angle = (positions.float()[:, None] * inverse).double()
    cos, sin = angle.cos() * factor, angle.sin() * factor
    size = angle.shape[1] * 2
    c, s = (
        torch.empty(len(positions), size, dtype=torch.float64),
        torch.empty(len(positions), size, dtype=torch.float64),
    )
    for i in range(size // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + size // 2)
        c[:, first], c[:, second] = cos[:, i], cos[:, i]
        s[:, first], s[:, second] = -sin[:, i], sin[:, i]
    return c, s

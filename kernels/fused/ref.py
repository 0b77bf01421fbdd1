"""Plain torch references of the small operations between matrix products."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """X in `dtype`; unlike x.to, it costs next to nothing where x has it already."""
    return x if x.dtype is dtype else x.to(dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    X is rounded to the weight's dtype first, y to that dtype and then to out_dtype, if there is one.
    """
    x = x if weight is None else cast(x, weight.dtype)
    if x.dtype != torch.float32 or not x.is_cpu:
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
    else:
        # torch has no fused kernel for this on CPUs; four small operations are fewer than its own chain.
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        y = x * torch.addcmul(_constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        y = y if weight is None else y.mul_(weight)
    return y if out_dtype is None else cast(y, out_dtype)


@lru_cache(maxsize=16)
def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; rounded as in rms_norm."""
    x = x if weight is None else cast(x, weight.dtype)
    y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y if out_dtype is None else cast(y, out_dtype)


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += delta (+ second), in place and in hidden's dtype; returns rms_norm(hidden)."""
    _add(hidden, delta, second)
    return rms_norm(hidden, weight, eps, out_dtype)


def add_layer_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += delta (+ second), in place and in hidden's dtype; returns layer_norm(hidden)."""
    _add(hidden, delta, second)
    return layer_norm(hidden, weight, bias, eps, out_dtype)


def norm_add(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """hidden += rms_norm(delta), the norm rounded to the weight's dtype and to hidden's before it is added."""
    hidden.add_(rms_norm(delta, weight, eps, hidden.dtype))


def norm_add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    delta_weight: torch.Tensor,
    delta_eps: float,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """hidden += rms_norm(delta) by delta_weight, in place; returns rms_norm(hidden) by weight."""
    norm_add(hidden, delta, delta_weight, delta_eps)
    return rms_norm(hidden, weight, eps, out_dtype)


def _add(hidden: torch.Tensor, delta: torch.Tensor, second: torch.Tensor | None) -> None:
    hidden.add_(delta)
    if second is not None:
        hidden.add_(second)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""By the names that Hugging Face configs use."""


def act_and_mul(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """act(gate) * up: act(gate) in gate's dtype, then the product in it."""
    return ACTIVATIONS[name](gate) * up


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """Rows of table [V, H] for ids [T]: round(round(table[id]) * scale) in out_dtype; zeros for ids outside [0, V)."""
    known = (ids >= 0) & (ids < table.shape[0])
    rows = F.embedding(torch.where(known, ids, 0), table).to(out_dtype)
    rows = rows if scale == 1.0 else rows * scale
    return rows.masked_fill_(~known[:, None], 0)


def rotary_angles(
    positions: torch.Tensor, inverse: torch.Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [T, 1, R] for `rotate`; inverse float32 [R/2] or [T, R/2].

    The angles positions * inverse, their functions and the product by factor are in float32; the results in dtype.
    """
    angles = positions.to(torch.float32)[:, None] * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first R dimensions of each head.

    x [T, heads, D]; cos, sin [T, 1, R]. out = x * cos + swap(x) * sin, where swap exchanges the two members of each
    pair, (i, i + R/2) or, interleaved, (2i, 2i + 1), and sin carries the sign: minus for a pair's first member.
    """
    size = cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    if interleaved:
        swapped = turning.unflatten(-1, (size // 2, 2)).flip(-1).flatten(-2)
    else:
        swapped = turning.roll(size // 2, -1)
    turned = torch.addcmul(turning * cos, swapped, sin)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap

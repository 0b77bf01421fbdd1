"""Plain torch references of the small operations between matrix products."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """X in `dtype`; unlike x.to, it costs next to nothing where x has it already."""
    return x if x.dtype is dtype else x.to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, returned in x's dtype."""
    if x.dtype != torch.float32 or not x.is_cpu:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # torch has no fused kernel for this on CPUs; four small operations are fewer than its own chain.
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    y = x * torch.addcmul(_constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return y if weight is None else y.mul_(weight)


@lru_cache(maxsize=16)
def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


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

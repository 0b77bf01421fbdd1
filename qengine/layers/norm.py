"""Normalization over the last dimension."""

from __future__ import annotations

import torch

from qengine.kernels.fused.ref import cast, layer_norm, rms_norm


class RMSNorm:
    """x / rms(x) * weight. weight [H]; the result is in `out_dtype`, which may be narrower than x's."""

    def __init__(self, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight
        self.eps = eps
        self.out_dtype = out_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., H] in any floating dtype -> [..., H] in out_dtype."""
        if x.is_cuda and x.dim() == 2:
            from qengine.kernels.fused import ops

            return ops.rms_norm(x, self.weight, self.eps, self.out_dtype)
        return rms_norm(x, self.weight, self.eps, self.out_dtype)

    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias. weight, bias [H]; the result is in `out_dtype`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.out_dtype = out_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., H] in any floating dtype -> [..., H] in out_dtype."""
        if x.is_cuda and x.dim() == 2:
            from qengine.kernels.fused import ops

            return ops.layer_norm(x, self.weight, self.bias, self.eps, self.out_dtype)
        return layer_norm(x, self.weight, self.bias, self.eps, self.out_dtype)

    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class HeadNorm:
    """Norm over each head of q and k at once: x [T, heads, D], weight [heads, D]. kind "rms" or "layer" (no bias)."""

    def __init__(self, weight: torch.Tensor, eps: float, kind: str) -> None:
        self.weight = weight
        self.eps = eps
        self.kind = kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, heads, D] -> the same, in x's dtype."""
        wide = cast(x, self.weight.dtype)
        normed = rms_norm(wide, None, self.eps) if self.kind == "rms" else layer_norm(wide, None, None, self.eps)
        return cast(normed * self.weight, x.dtype)

    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes


Norm = RMSNorm | LayerNorm

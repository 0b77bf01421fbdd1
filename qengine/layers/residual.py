"""The residual stream between sublayers: add what a sublayer gave, norm for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.layers.norm import LayerNorm, Norm, RMSNorm


@dataclass(frozen=True)
class Pending:
    """A sublayer's output that the residual stream does not hold yet. norm: on the output, before it is added."""

    value: torch.Tensor
    norm: Norm | None = None


def add_and_norm(hidden: torch.Tensor, pending: Pending | None, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden + pending, its norm for the next sublayer); without a norm the sum itself is the second.

    hidden [T, H] in the residual stream's dtype; on a GPU it may be changed in place.
    """
    if hidden.is_cuda and pending is not None:
        return hidden, _add_and_norm_in_place(hidden, pending, norm)
    if pending is not None:
        value = pending.value if pending.norm is None else pending.norm(pending.value)
        hidden = hidden + value
    return hidden, hidden if norm is None else norm(hidden)


def _add_and_norm_in_place(hidden: torch.Tensor, pending: Pending, norm: Norm | None) -> torch.Tensor:
    """The second of add_and_norm's results, in one kernel; hidden becomes the first."""
    from qengine.kernels.fused import ops

    value, inner = pending.value, pending.norm
    if isinstance(inner, RMSNorm) and norm is None:
        ops.norm_add(hidden, value, inner.weight, inner.eps)
    elif isinstance(inner, RMSNorm) and isinstance(norm, RMSNorm):
        dtype = norm.out_dtype
        return ops.norm_add_norm(hidden, value, inner.weight, inner.eps, norm.weight, norm.eps, dtype)
    else:
        value = value if inner is None else inner(value)
        if isinstance(norm, RMSNorm):
            return ops.add_rms_norm(hidden, value, norm.weight, norm.eps, norm.out_dtype)
        if isinstance(norm, LayerNorm):
            return ops.add_layer_norm(hidden, value, norm.weight, norm.bias, norm.eps, norm.out_dtype)
        hidden.add_(value)
    return hidden

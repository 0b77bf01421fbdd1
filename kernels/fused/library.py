"""The torch operators `qengine::...` of the fused kernels, each with its fake. Callers use ops.py, which checks."""

from __future__ import annotations

import torch

from qengine.kernels.operator import operator

from . import ref
from .activation import run_act_and_mul
from .embedding import run_embedding
from .norm import run_norm
from .rotary import run_rotary


def _result(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@operator("qengine::norm", mutates_args=())
def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    kind: str,
) -> torch.Tensor:
    """See ops.rms_norm and ops.layer_norm."""
    if not x.is_cuda:
        if kind == "layer":
            return ref.layer_norm(x, weight, bias, eps, out_dtype)
        return ref.rms_norm(x, weight, eps, out_dtype)
    out = _result(x, out_dtype)
    run_norm(x, out, weight, bias, eps, kind)
    return out


@norm.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    kind: str,
) -> torch.Tensor:
    return _result(x, out_dtype)


@operator("qengine::rms_norm_", mutates_args=("x",))
def rms_norm_(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """See ops.rms_norm_."""
    if not x.is_cuda:
        x.copy_(ref.rms_norm(x, weight, eps))
        return
    run_norm(x, x, weight, None, eps)


@rms_norm_.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    return None


@operator("qengine::add_norm", mutates_args=("hidden",))
def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    second: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    kind: str,
) -> torch.Tensor:
    """See ops.add_rms_norm and ops.add_layer_norm."""
    if not hidden.is_cuda:
        if kind == "layer":
            return ref.add_layer_norm(hidden, delta, weight, bias, eps, out_dtype, second)
        return ref.add_rms_norm(hidden, delta, weight, eps, out_dtype, second)
    out = _result(hidden, out_dtype)
    run_norm(hidden, out, weight, bias, eps, kind, delta=delta, second=second)
    return out


@add_norm.register_fake
def _(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    second: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    kind: str,
) -> torch.Tensor:
    return _result(hidden, out_dtype)


@operator("qengine::norm_add", mutates_args=("hidden",))
def norm_add(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """See ops.norm_add."""
    if not hidden.is_cuda:
        ref.norm_add(hidden, delta, weight, eps)
        return
    run_norm(hidden, None, delta=delta, inner=weight, inner_eps=eps)


@norm_add.register_fake
def _(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    return None


@operator("qengine::norm_add_norm", mutates_args=("hidden",))
def norm_add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    delta_weight: torch.Tensor,
    delta_eps: float,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ops.norm_add_norm."""
    if not hidden.is_cuda:
        return ref.norm_add_norm(hidden, delta, delta_weight, delta_eps, weight, eps, out_dtype)
    out = _result(hidden, out_dtype)
    run_norm(hidden, out, weight, None, eps, delta=delta, inner=delta_weight, inner_eps=delta_eps)
    return out


@norm_add_norm.register_fake
def _(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    delta_weight: torch.Tensor,
    delta_eps: float,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return _result(hidden, out_dtype)


@operator("qengine::act_and_mul", mutates_args=())
def act_and_mul(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """See ops.act_and_mul."""
    if not gate.is_cuda:
        return ref.act_and_mul(gate, up, name)
    out = _result(gate, gate.dtype)
    run_act_and_mul(gate, up, out, name)
    return out


@act_and_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    return _result(gate, gate.dtype)


@operator("qengine::embed", mutates_args=())
def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """See ops.embed."""
    if not ids.is_cuda:
        return ref.embed(ids, table, scale, out_dtype)
    out = torch.empty(ids.shape[0], table.shape[1], dtype=out_dtype, device=ids.device)
    run_embedding(ids.contiguous(), table, scale, out)
    return out


@embed.register_fake
def _(ids: torch.Tensor, table: torch.Tensor, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(ids.shape[0], table.shape[1], dtype=out_dtype, device=ids.device)


@operator("qengine::rotary_angles", mutates_args=())
def rotary_angles(
    positions: torch.Tensor, inverse: torch.Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.rotary_angles."""
    if not positions.is_cuda:
        return ref.rotary_angles(positions, inverse, factor, dtype, interleaved)
    shape = (positions.shape[0], 1, 2 * inverse.shape[-1])
    cos = torch.empty(shape, dtype=dtype, device=positions.device)
    sin = torch.empty(shape, dtype=dtype, device=positions.device)
    run_rotary(positions.contiguous(), inverse.contiguous(), factor, cos, sin, interleaved)
    return cos, sin


@rotary_angles.register_fake
def _(
    positions: torch.Tensor, inverse: torch.Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[0], 1, 2 * inverse.shape[-1])
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)

"""Where a layer's input scales can be folded, so that the model's function stays the same.

Dividing a linear's input by s and multiplying its columns by s changes nothing. The division goes into whatever makes
the input: the norm before it, the rows of v_proj for o_proj (attention is linear in v), or the rows of up_proj for
down_proj (the gate multiplies it). A norm after the sublayer (OLMo 2) makes no linear's input, so nothing folds there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qengine.models.spec import ModelSpec

STAGES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj", "gate_up_proj"),
    ("down_proj",),
)


@dataclass(frozen=True)
class Fold:
    """Linears that share an input, and its producer.

    consumers: names relative to the layer. norm: the norm whose weight (and bias) is divided, or None. producer: the
    linear whose output rows `rows` make the input, or None. share: int64 [K], input columns that come from the same
    producer row have the same number, which is that row's place in `rows`; None where each has its own.
    """

    consumers: tuple[str, ...]
    norm: str | None = None
    producer: str | None = None
    rows: slice | None = None
    share: torch.Tensor | None = None


def stages(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layer's linears in the order data flows through them: q, k, v / o / gate, up / down / any other alone."""
    rest = list(names)
    result = []
    for members in STAGES:
        found = tuple(name for name in rest if name.rsplit(".", 1)[-1] in members)
        if found:
            result.append(found)
            rest = [name for name in rest if name not in found]
    return result + [(name,) for name in rest]


def find_folds(spec: ModelSpec) -> list[Fold]:
    """The foldings that the layers of a family allow."""
    stage = {s[0].rsplit(".", 1)[-1]: s for s in stages(spec.linear_shapes())}
    qkv = stage["qkv_proj" if spec.fused_qkv else "q_proj"]
    mlp = stage["gate_up_proj" if spec.fused_gate_up else "gate_proj"]
    folds = []
    if spec.norms.attention_in is not None:
        readers = (*qkv, *mlp) if spec.parallel_residual else qkv  # then one norm feeds attention and MLP alike
        folds.append(Fold(readers, norm=spec.norms.attention_in))
    if spec.norms.mlp_in is not None and not spec.parallel_residual:
        folds.append(Fold(mlp, norm=spec.norms.mlp_in))
    folds.append(_value_fold(spec, qkv, stage["o_proj"]))
    size = spec.intermediate_size
    up, rows = (mlp[0], slice(size, 2 * size)) if spec.fused_gate_up else (mlp[1], slice(0, size))
    folds.append(Fold(stage["down_proj"], producer=up, rows=rows))
    return folds


def _value_fold(spec: ModelSpec, qkv: tuple[str, ...], output: tuple[str, ...]) -> Fold:
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    share = None
    if heads != kv_heads:  # query head h reads value head h // (heads / kv_heads)
        share = torch.arange(kv_heads * dim).reshape(kv_heads, 1, dim).expand(-1, heads // kv_heads, -1).reshape(-1)
    if len(qkv) == 1:
        start = (heads + kv_heads) * dim
        return Fold(output, producer=qkv[0], rows=slice(start, start + kv_heads * dim), share=share)
    value = next(name for name in qkv if name.endswith("v_proj"))
    return Fold(output, producer=value, rows=slice(0, kv_heads * dim), share=share)


def fold_norm(
    weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(norm weight, norm bias, scales) after dividing a norm's output by `scales` [K].

    The weight comes out as a float16 value, and the scales come out as exactly what that value divides by, so that its
    rounding changes nothing (it matters for norms stored as weight - 1, where the rounding can be large). Channels
    where no float16 does it within a factor of two keep their weight and get the scale that rounding alone needs.
    """
    weight = weight.float()
    gain = weight + offset
    stored = (gain / scales - offset).to(torch.float16).float()
    exact = gain / (stored + offset)
    plain = weight.to(torch.float16).float()
    keep = ~(torch.isfinite(exact) & (exact > scales / 2) & (exact < scales * 2))
    rounded = gain / (plain + offset)
    rounded = torch.where(torch.isfinite(rounded) & (rounded > 0.5) & (rounded < 2), rounded, torch.ones_like(rounded))
    stored = torch.where(keep, plain, stored)
    exact = torch.where(keep, rounded, exact)
    return stored, None if bias is None else bias.float() / exact, exact


def producer_scales(fold: Fold, scales: torch.Tensor) -> torch.Tensor:
    """The divisor of each producer row, [rows], from input scales [K] that are equal where they share a row."""
    if fold.share is None:
        return scales
    rows = scales.new_ones(int(fold.share.max()) + 1)
    return rows.index_copy_(0, fold.share.to(scales.device), scales)

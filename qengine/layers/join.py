"""Rewriting linear layers at load, so that a step does less: joining those that read the same input into one, and
folding the order of an act-order layer's columns into the layers before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qengine.quant import LinearWeight, PlainWeight, QuantizedWeight


def join_weights(parts: Sequence[LinearWeight]) -> LinearWeight | None:
    """One weight with the rows of all parts, in order; None if their forms differ (bits, groups, dtypes)."""
    if all(isinstance(part, PlainWeight) for part in parts):
        return _join_plain([part for part in parts if isinstance(part, PlainWeight)])
    if all(isinstance(part, QuantizedWeight) for part in parts):
        return _join_quantized([part for part in parts if isinstance(part, QuantizedWeight)])
    return None


def _join_plain(parts: list[PlainWeight]) -> PlainWeight | None:
    if len({part.weight.dtype for part in parts}) != 1:
        return None
    bias = _join_biases([(part.bias, part.weight.shape[0]) for part in parts])
    return PlainWeight(torch.cat([part.weight for part in parts]), bias)


def _join_quantized(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    first = parts[0]
    for part in parts[1:]:
        same = (
            part.spec.bits == first.spec.bits
            and part.group_size == first.group_size
            and part.scales.dtype == first.scales.dtype
            and part.scales.shape[1] == first.scales.shape[1]
            and _same_order(part.g_idx, first.g_idx)
        )
        if not same:
            return None
    return QuantizedWeight(
        q=torch.cat([part.q for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
        spec=first.spec,
        g_idx=first.g_idx,
        bias=_join_biases([(part.bias, part.shape[0]) for part in parts]),
    )


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _join_biases(biases: list[tuple[torch.Tensor | None, int]]) -> torch.Tensor | None:
    """Biases end to end, zeros for the parts without one; None if no part has one."""
    known = [bias for bias, _ in biases if bias is not None]
    if not known:
        return None
    return torch.cat([known[0].new_zeros(rows) if bias is None else bias for bias, rows in biases])


def fold_order(inputs: Sequence[LinearWeight], output: LinearWeight) -> tuple[list[LinearWeight], LinearWeight]:
    """Weights whose products are those of `output` on an element-wise function of `inputs`, without act-order.

    output [N, K] reads f(results of the inputs) [T, K]; f goes element by element (act(gate) * up), and nothing else
    reads these results. Its columns are sorted by group and the rows of each input, K or stacked multiples
    of K (gate_up_proj), are put in the same order, so that activations need no permutation. All are
    returned as they came where `output` has no order, or groups that are unequal and have to be padded.
    """
    order = _group_order(output)
    if order is None or any(_rows(part) % order.numel() for part in inputs):
        return list(inputs), output
    assert isinstance(output, QuantizedWeight), "only quantized weights have an order"
    spec = replace(output.spec, desc_act=False)
    return [_reorder_rows(part, order) for part in inputs], replace(output, q=output.q[:, order], g_idx=None, spec=spec)


def _group_order(weight: LinearWeight) -> torch.Tensor | None:
    """int64 [K]: columns in the order of their groups; None where that is their own order or the groups are unequal."""
    if not isinstance(weight, QuantizedWeight) or weight.g_idx is None:
        return None
    groups = weight.g_idx.long()
    columns = torch.arange(groups.numel(), device=groups.device)
    order = torch.argsort(groups, stable=True)
    if torch.equal(order, columns) or not torch.equal(groups[order], columns // weight.group_size):
        return None
    return order


def _rows(weight: LinearWeight) -> int:
    return weight.weight.shape[0] if isinstance(weight, PlainWeight) else weight.shape[0]


def _reorder_rows(weight: LinearWeight, order: torch.Tensor) -> LinearWeight:
    """The weight with its rows, and those of its bias, in `order`, within each stack of len(order) rows."""
    starts = torch.arange(0, _rows(weight), order.numel(), device=order.device)
    return reorder_rows(weight, (starts[:, None] + order[None, :]).flatten())


def reorder_rows(weight: LinearWeight, rows: torch.Tensor) -> LinearWeight:
    """The weight whose row i, with its bias, is row rows[i] of this one. rows: int64 [N]."""
    bias = None if weight.bias is None else weight.bias[rows.to(weight.bias.device)]
    if isinstance(weight, PlainWeight):
        return PlainWeight(weight.weight[rows.to(weight.weight.device)], bias)
    rows = rows.to(weight.q.device)
    return replace(weight, q=weight.q[rows], scales=weight.scales[rows], zeros=weight.zeros[rows], bias=bias)

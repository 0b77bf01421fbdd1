"""Joining linear layers that read the same input into one, so that a step makes one call instead of two or three."""

from __future__ import annotations

from collections.abc import Sequence

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

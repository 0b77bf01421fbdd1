"""The output head, quantized like any linear when `--keep` gives it bits: its input is the final norm's output."""

from __future__ import annotations

from copy import copy

import torch

from qengine.convert.gptq import GPTQSettings
from qengine.convert.layer_result import LayerResult
from qengine.convert.quantize_layer import LayerInput, quantize_nearest, quantize_stage
from qengine.convert.runner import CalibrationRunner
from qengine.convert.scheme import Scheme
from qengine.convert.stats import SplitStats
from qengine.layers.norm import Norm
from qengine.quant.weights import QuantizedWeight

ROWS = 16384
"""Rows at a time: a vocabulary of 128,000 rows is 2 GB in float32, and rows do not depend on each other."""


@torch.no_grad()
def head_stats(runner: CalibrationRunner, norm: Norm) -> SplitStats:
    """What the head sees, in the quantized model and in the source."""
    stats = runner.new_stats()
    for start in range(0, runner.samples):
        rows, expected = (norm(states.read(start, start + 1)[0]) for states in (runner.states, runner.reference))
        stats.add(rows, expected, runner.fit_rows(start))
    return stats


@torch.no_grad()
def quantize_head(
    name: str,
    weight: torch.Tensor,
    scheme: Scheme,
    stats: SplitStats | None,
    method: str,
    settings: GPTQSettings,
    device: torch.device,
) -> LayerResult:
    """`weight` [V, H] by `method`; rounded to nearest without statistics, or with such as hold inf or NaN."""
    whole = LayerResult()
    parts: list[QuantizedWeight] = []
    records = []
    usable = stats is not None and stats.usable
    for rows in weight.split(ROWS):
        layer = LayerInput("", {name: rows.to(device, torch.float32)}, {name: scheme}, lambda _: None)
        result = LayerResult()
        if stats is not None and usable:
            quantize_stage(layer, (name,), copy(stats), method, settings, result)
        else:
            quantize_nearest(layer, (name,), result)
        made = result.quantized[name]
        parts.append(QuantizedWeight(made.q.cpu(), made.scales.cpu(), made.zeros.cpu(), made.spec, made.g_idx))
        records += result.records
        whole.warnings += [text for text in result.warnings if text not in whole.warnings]
    if stats is not None and not usable:
        whole.warnings.append(f"{name}: its calibration inputs hold inf or NaN; rounded to nearest")
    g_idx = parts[0].g_idx
    q, scales, zeros = (torch.cat([getattr(part, field) for part in parts]) for field in ("q", "scales", "zeros"))
    whole.quantized[name] = QuantizedWeight(q, scales, zeros, parts[0].spec, None if g_idx is None else g_idx.cpu())
    first = records[0]
    first.name = name
    for field in ("weight_error", "error", "rtn_error"):
        values = [getattr(record, field) for record in records]
        known = [value for value in values if value is not None]
        setattr(first, field, sum(known) / len(known) if known else None)
    whole.records.append(first)
    return whole

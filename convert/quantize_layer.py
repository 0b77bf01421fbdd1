"""Quantizes the linears of one decoder layer by each method, given what calibration saw of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qengine.convert.awq import quantize_clipped, search_scales
from qengine.convert.folding import Fold, fold_norm, producer_scales
from qengine.convert.gptq import FactorizationError, GPTQSettings, quantize_gptq
from qengine.convert.layer_result import LayerResult, LinearRecord
from qengine.convert.rtn import quantize_rtn, round_trip
from qengine.convert.scheme import Scheme
from qengine.convert.stats import InputStats, output_error
from qengine.quant.weights import QuantizedWeight, QuantSpec


@dataclass(frozen=True)
class LayerInput:
    """weights: float32 [N, K] of all linears of the layer. schemes: of those to quantize. name: of the layer."""

    name: str
    weights: dict[str, torch.Tensor]
    schemes: dict[str, Scheme]
    norm_tensor: Callable[[str], torch.Tensor | None]
    norm_offset: float = 0.0


def apply_folds(layer: LayerInput, folds: list[Fold], stats: dict[str, InputStats], result: LayerResult) -> None:
    """AWQ's scale search: fills the result's columns, rows and norms. stats: by linear name."""
    for fold in folds:
        seen = stats.get(fold.consumers[0])
        if seen is None or not seen.usable or any(name not in layer.schemes for name in fold.consumers):
            continue
        device = layer.weights[fold.consumers[0]].device
        share = None if fold.share is None else fold.share.to(device)
        choice = search_scales(
            [layer.weights[name] for name in fold.consumers],
            seen.second_moment(),
            seen.mean_magnitude(),
            layer.schemes[fold.consumers[0]],
            share=share,
        )
        scales = choice.scales
        if fold.norm is not None:
            weight, bias = layer.norm_tensor(f"{fold.norm}.weight"), layer.norm_tensor(f"{fold.norm}.bias")
            assert weight is not None, f"{layer.name}: {fold.norm} has no weight"
            bias = None if bias is None else bias.to(device)
            new_weight, new_bias, scales = fold_norm(weight.to(device), bias, scales, layer.norm_offset)
            result.norms[fold.norm] = (new_weight, new_bias)
        else:
            assert fold.producer is not None, "a fold goes into a norm or a linear"
            assert fold.rows is not None, "a fold into a linear names its rows"
            rows = result.rows.setdefault(
                fold.producer, torch.ones(layer.weights[fold.producer].shape[0], device=device)
            )
            rows[fold.rows] = producer_scales(fold, scales)
        for name in fold.consumers:
            result.columns[name] = scales


def quantize_awq(layer: LayerInput, names: tuple[str, ...], stats: InputStats, result: LayerResult) -> None:
    """Clip and round linears that share one input, with the columns that `apply_folds` chose."""
    moment = stats.second_moment()
    for name in names:
        columns = result.columns.get(name)
        scaled = moment if columns is None else moment / columns[:, None] / columns[None, :]
        weight = result.to_file(name, layer.weights[name])
        store(layer, name, "awq", quantize_clipped(weight, scaled, layer.schemes[name]), moment, result)


def quantize_gptq_stage(
    layer: LayerInput, names: tuple[str, ...], stats: InputStats, settings: GPTQSettings, result: LayerResult
) -> None:
    """GPTQ for linears that share one input: stacked, because their rows do not depend on each other."""
    moment = stats.second_moment()
    scheme = layer.schemes[names[0]]
    stacked = torch.cat([layer.weights[name] for name in names])
    try:
        whole = quantize_gptq(stacked, moment, scheme, settings)
    except FactorizationError as error:
        result.warnings.append(f"{layer.name}.{names[0]}: {error}; rounded to nearest instead")
        quantize_nearest(layer, names, result, moment)
        return
    at = 0
    for name in names:
        rows = slice(at, at + layer.weights[name].shape[0])
        at = rows.stop
        part = QuantizedWeight(whole.q[rows], whole.scales[rows], whole.zeros[rows], whole.spec, whole.g_idx)
        store(layer, name, "gptq", part, moment, result)


def quantize_nearest(
    layer: LayerInput, names: tuple[str, ...], result: LayerResult, moment: torch.Tensor | None = None
) -> None:
    """Round to nearest, for method rtn and where calibration gave nothing usable."""
    for name in names:
        weight = result.to_file(name, layer.weights[name])
        store(layer, name, "rtn", quantize_rtn(weight, layer.schemes[name]), moment, result)


def store(
    layer: LayerInput,
    name: str,
    method: str,
    quantized: QuantizedWeight,
    moment: torch.Tensor | None,
    result: LayerResult,
) -> None:
    """Put one quantized linear and its record into the result."""
    scheme, weight = layer.schemes[name], layer.weights[name]
    spec = QuantSpec(scheme.bits, scheme.group_size, scheme.sym, quantized.g_idx is not None, method, "none")
    result.quantized[name] = QuantizedWeight(quantized.q, quantized.scales, quantized.zeros, spec, quantized.g_idx)
    record = LinearRecord(f"{layer.name}.{name}", method, scheme.bits, scheme.group(weight.shape[1]))
    delta = result.effective(name) - weight
    squares = float(weight.square().sum())
    record.weight_error = float(delta.square().sum()) / squares if squares > 0 else 0.0
    if moment is not None:
        energy = float(output_error(weight, moment))
        if energy > 0:
            record.error = float(output_error(delta, moment)) / energy
            record.rtn_error = record.error
            if method != "rtn":
                record.rtn_error = float(output_error(round_trip(weight, scheme) - weight, moment)) / energy
    result.records.append(record)

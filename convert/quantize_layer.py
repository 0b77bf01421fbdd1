"""Quantizes the linears of one decoder layer by each method, given what calibration saw of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from qengine.convert.awq import CLIP_STEPS, quantize_clipped, search_scales
from qengine.convert.correction import corrected
from qengine.convert.folding import Fold, fold_norm, producer_scales
from qengine.convert.gptq import FactorizationError, GPTQSettings, quantize_gptq
from qengine.convert.layer_result import LayerResult, LinearRecord
from qengine.convert.phases import phase
from qengine.convert.rtn import quantize_rtn, round_trip
from qengine.convert.scheme import Scheme
from qengine.convert.stats import InputStats, SplitStats, model_error, output_error
from qengine.quant.weights import QuantizedWeight, QuantSpec

UNCLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True)
class LayerInput:
    """weights: float32 [N, K] of all linears of the layer. schemes: of those to quantize. name: of the layer."""

    name: str
    weights: dict[str, torch.Tensor]
    schemes: dict[str, Scheme]
    norm_tensor: Callable[[str], torch.Tensor | None]
    norm_offset: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device


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


def quantize_stage(
    layer: LayerInput,
    names: tuple[str, ...],
    stats: SplitStats,
    method: str,
    settings: GPTQSettings,
    result: LayerResult,
) -> None:
    """Round linears that share one input by `method`, in the columns that `apply_folds` chose.

    method: "awq" clips, "gptq" compensates, "best" does for each linear what had the lower error on the held-out rows.
    """
    ways: dict[str, Rounding] = {"awq": round_clipped, "gptq": partial(round_gptq, settings=settings)}
    chosen = dict.fromkeys(names, method)
    if method == "best":
        with phase("choice"):
            chosen = _choose(layer, names, stats, ways, result)
    every = stats.all_rows()
    with phase("target"):
        targets = dict(zip(names, corrected([layer.weights[name] for name in names], every), strict=True))
    moment = every.second_moment()
    stats.release()
    del every
    for way, rounding in ways.items():
        part = tuple(name for name in names if chosen[name] == way)
        with phase("rounding"):
            made = rounding(layer, part, targets, moment, result) if part else {}
        with phase("errors"):
            for name, quantized in made.items():
                store(layer, name, way, quantized, result, moment, targets[name])


def _choose(
    layer: LayerInput, names: tuple[str, ...], stats: SplitStats, ways: dict[str, Rounding], result: LayerResult
) -> dict[str, str]:
    """Name -> the way whose rounding of the fitted rows' targets is nearest to the source on the held-out rows."""
    held = stats.held if stats.held is not None else stats.fit
    moment, cross = held.second_moment(), held.cross_moment()
    targets = dict(zip(names, corrected([layer.weights[name] for name in names], stats.fit), strict=True))
    errors: dict[str, dict[str, float]] = {name: {} for name in names}
    fitted = stats.fit.second_moment()
    for way, rounding in ways.items():
        for name, quantized in rounding(layer, names, targets, fitted, result).items():
            delta = result.taken_out(name, quantized) - layer.weights[name]
            errors[name][way] = float(model_error(delta, layer.weights[name], moment, cross))
    return {name: min(found, key=lambda way: found[way]) for name, found in errors.items()}


Rounding = Callable[
    [LayerInput, tuple[str, ...], dict[str, torch.Tensor], torch.Tensor, LayerResult], dict[str, QuantizedWeight]
]


def _scaled_moment(name: str, moment: torch.Tensor, result: LayerResult) -> torch.Tensor:
    """The second moment of what the linear sees in the file, its input divided by the columns' scales."""
    if name not in result.columns:
        return moment
    scaled = moment / result.columns[name][:, None]
    return scaled.div_(result.columns[name][None, :])


def round_clipped(
    layer: LayerInput,
    names: tuple[str, ...],
    targets: dict[str, torch.Tensor],
    moment: torch.Tensor,
    result: LayerResult,
) -> dict[str, QuantizedWeight]:
    """Each group's range shrunk to where its own error is least, then rounded to nearest."""
    scaled = _scaled_moment(names[0], moment, result)
    made = {}
    for name in names:
        # what queries and keys lose by clipping grows in the softmax, which their outputs' error does not show
        steps = (1.0,) if name.endswith(UNCLIPPED) else CLIP_STEPS
        weight = result.to_file(name, targets[name])
        made[name] = quantize_clipped(weight, scaled, layer.schemes[name], steps=steps)
    return made


def round_gptq(
    layer: LayerInput,
    names: tuple[str, ...],
    targets: dict[str, torch.Tensor],
    moment: torch.Tensor,
    result: LayerResult,
    *,
    settings: GPTQSettings,
) -> dict[str, QuantizedWeight]:
    """GPTQ of the linears stacked, because their rows do not depend on each other."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name in names:
        by_scheme.setdefault(layer.schemes[name], []).append(name)
    scaled = _scaled_moment(names[0], moment, result)
    made: dict[str, QuantizedWeight] = {}
    for scheme, group in by_scheme.items():
        stacked = torch.cat([result.to_file(name, targets[name]) for name in group])
        try:
            whole = quantize_gptq(stacked, scaled, scheme, settings)
        except FactorizationError as error:
            result.warnings.append(f"{layer.name}.{group[0]}: {error}; clipped and rounded to nearest instead")
            whole = quantize_clipped(stacked, scaled, scheme)
        at = 0
        for name in group:
            rows = slice(at, at + layer.weights[name].shape[0])
            at = rows.stop
            made[name] = QuantizedWeight(whole.q[rows], whole.scales[rows], whole.zeros[rows], whole.spec, whole.g_idx)
    return made


def quantize_nearest(layer: LayerInput, names: tuple[str, ...], result: LayerResult) -> None:
    """Round to nearest, for method rtn and where calibration gave nothing usable."""
    for name in names:
        weight = result.to_file(name, layer.weights[name])
        store(layer, name, "rtn", quantize_rtn(weight, layer.schemes[name]), result)


def store(
    layer: LayerInput,
    name: str,
    method: str,
    quantized: QuantizedWeight,
    result: LayerResult,
    moment: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> None:
    """Put one quantized linear and its record into the result. target: the weight in full precision that was aimed at
    on the inputs of second moment `moment`."""
    scheme, weight = layer.schemes[name], layer.weights[name]
    spec = QuantSpec(scheme.bits, scheme.group_size, scheme.sym, quantized.g_idx is not None, method, "none")
    result.quantized[name] = QuantizedWeight(quantized.q, quantized.scales, quantized.zeros, spec, quantized.g_idx)
    record = LinearRecord(f"{layer.name}.{name}", method, scheme.bits, scheme.group(weight.shape[1]))
    rounded = result.effective(name)
    squares = float(weight.square().sum())
    record.weight_error = float((rounded - weight).square().sum()) / squares if squares > 0 else 0.0
    if moment is not None and target is not None:
        energy = float(output_error(weight, moment))
        if energy > 0:
            record.error = float(output_error(rounded - target, moment)) / energy
            record.rtn_error = float(output_error(round_trip(weight, scheme) - target, moment)) / energy
    result.records.append(record)

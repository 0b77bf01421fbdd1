"""AWQ, GPTQ and the better of both on one decoder layer: what inputs each stage sees, when weights are replaced."""

from __future__ import annotations

from typing import Any

import torch

from qengine.convert.folding import find_folds, stages
from qengine.convert.gptq import GPTQSettings
from qengine.convert.layer_result import LayerResult
from qengine.convert.phases import phase
from qengine.convert.precision import full_precision
from qengine.convert.quantize_layer import LayerInput, apply_folds, quantize_nearest, quantize_stage
from qengine.convert.runner import CalibrationRunner, Hook
from qengine.convert.settings import ConvertSettings
from qengine.convert.stats import InputStats, SplitStats
from qengine.models import DecoderLayer
from qengine.models.spec import ModelSpec


class LayerMethods:
    """The method of `settings`, for layers of `spec`.

    True sequential order: the inputs of each stage (q, k, v / o / gate, up / down) come from the quantized linears
    before it, and are compared with what the source's linears see. AWQ's input scales are chosen before that, from the
    source's inputs, as they change the linears before, too.
    """

    def __init__(self, settings: ConvertSettings, spec: ModelSpec) -> None:
        self.settings = settings
        self.spec = spec
        self.gptq = GPTQSettings(order="act" if settings.desc_act else "static")

    def facts(self) -> dict[str, Any]:
        """What GPTQ's config says of its making."""
        return {"damp_percent": self.gptq.damp} if self.settings.method in ("gptq", "best") else {}

    def quantize(
        self,
        layer: DecoderLayer,
        source: DecoderLayer,
        layer_input: LayerInput,
        result: LayerResult,
        runner: CalibrationRunner,
    ) -> tuple[int, float | None]:
        """Fill `result`, and take the runner's states through the layers; returns what `runner.advance` does.

        Where one batch holds the calibration data, each stage is quantized on the way, in a single pass.
        """
        ordered = stages(layer_input.weights)
        firsts = [stage[0] for stage in ordered]
        if runner.one_batch:
            return self._on_the_way(layer, source, layer_input, result, runner, ordered)
        if self.settings.method != "gptq":
            self._fold(layer_input, ordered, runner.observe_source(source, firsts), result)
        for stage in ordered:
            self._stage(layer, layer_input, stage, runner.observe(layer, source, stage[0]), result)
        return runner.advance(layer, source)

    def _on_the_way(
        self,
        layer: DecoderLayer,
        source: DecoderLayer,
        layer_input: LayerInput,
        result: LayerResult,
        runner: CalibrationRunner,
        ordered: list[tuple[str, ...]],
    ) -> tuple[int, float | None]:
        references: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Hook:
            return lambda x: references.__setitem__(name, x)

        def see(stage: tuple[str, ...]) -> Hook:
            def hook(x: torch.Tensor) -> None:
                if stage is ordered[0] and self.settings.method != "gptq":
                    stats = {name: InputStats() for name in references}
                    for name, reference in references.items():
                        stats[name](reference)
                    self._fold(layer_input, ordered, stats, result)
                split = runner.new_stats()
                split.add(x, references.pop(stage[0]), runner.fit_rows(0))
                self._stage(layer, layer_input, stage, split, result)

            return hook

        firsts = [stage[0] for stage in ordered]
        hooks = {stage[0]: see(stage) for stage in ordered}
        return runner.advance(layer, source, hooks, {name: keep(name) for name in firsts})

    def _fold(
        self,
        layer_input: LayerInput,
        ordered: list[tuple[str, ...]],
        seen: dict[str, InputStats],
        result: LayerResult,
    ) -> None:
        stats = {name: seen[stage[0]] for stage in ordered for name in stage}
        with phase("scale search"), full_precision(layer_input.device):
            apply_folds(layer_input, find_folds(self.spec), stats, result)

    def _stage(
        self,
        layer: DecoderLayer,
        layer_input: LayerInput,
        stage: tuple[str, ...],
        stats: SplitStats,
        result: LayerResult,
    ) -> None:
        names = tuple(name for name in stage if name in layer_input.schemes)
        if not names:
            return
        free_pieces(layer_input.device)
        if stats.usable:
            with full_precision(layer_input.device):
                quantize_stage(layer_input, names, stats, self.settings.method, self.gptq, result)
        else:
            seen = stats.fit.rows or stats.fit.bad_rows
            why = "hold inf or NaN" if seen else "are missing, every sample before was dropped"
            for name in names:
                result.warnings.append(f"{layer_input.name}.{name}: its calibration inputs {why}; rounded to nearest")
            quantize_nearest(layer_input, names, result)
        linears = layer.linears()
        for name in names:
            linears[name].set_weight(result.effective(name))
        free_pieces(layer_input.device)


def free_pieces(device: torch.device) -> None:
    """Give back memory that is free: what is wanted next has other sizes, and would be taken beside it."""
    if device.type == "cuda":
        with phase("free memory"):
            torch.cuda.empty_cache()

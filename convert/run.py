"""Converts a plain checkpoint to a quantized one, one decoder layer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine import __version__
from qengine.checkpoint import Checkpoint, open_checkpoint
from qengine.checkpoint.writer import refuse_source_as_target
from qengine.convert.calibration import load_tokenizer, read_documents, sample_windows, start_tokens, tokenize
from qengine.convert.emit import Emitter, estimate_bytes
from qengine.convert.folding import find_folds, stages
from qengine.convert.formats import Plan, quantization_config
from qengine.convert.gptq import GPTQSettings
from qengine.convert.layer_result import LayerResult
from qengine.convert.plan import make_plan
from qengine.convert.quantize_layer import (
    LayerInput,
    apply_folds,
    quantize_awq,
    quantize_gptq_stage,
    quantize_nearest,
)
from qengine.convert.report import ConvertReport
from qengine.convert.runner import PREVIEW_WINDOWS, CalibrationRunner, relative_error
from qengine.convert.settings import ConvertSettings, resolve_settings
from qengine.convert.stats import InputStats
from qengine.convert.writer import SHARD_BYTES, FolderWriter
from qengine.errors import CheckpointError, UnsupportedError
from qengine.models import DecoderLayer, load_layer, model_spec
from qengine.models.loading import check_weights
from qengine.models.spec import ModelSpec
from qengine.quant import WeightSource, open_weights

Progress = Callable[[int, int], None]


def convert_checkpoint(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    **options: Any,
) -> ConvertReport:
    """Quantize `model` (a folder or hub id with plain weights) into the new folder `out`.

    options: those of `resolve_settings` (method, format, bits, group_size, sym, desc_act, samples, seq_len, seed,
    device). calibration: a .txt or .jsonl file, None for the bundled text. progress(done, total) is called as
    layers finish. force: replace a folder that exists. Equal options give equal bytes on equal machines.

    Raises ConfigError, CheckpointError, UnsupportedError or CapacityError, and then leaves `out` as it was.
    """
    settings = resolve_settings(**options)
    started = time.monotonic()
    checkpoint = open_checkpoint(model)
    refuse_source_as_target(Path(out), checkpoint.path)
    source = open_weights(checkpoint)
    if source.method is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: is quantized already ({source.method}); make a plain copy first: "
            f"qengine dequantize {checkpoint.path} --out DIR"
        )
    source.check()
    spec = model_spec(checkpoint)
    check_weights(source, spec)
    plan, notes = make_plan(_linear_shapes(source, spec), settings)
    report = ConvertReport(str(model), Path(out), settings, plan.group_size, checkpoint.disk_bytes(), warnings=notes)
    with FolderWriter(Path(out), force=force, shard_bytes=shard_bytes) as writer:
        writer.require_space(estimate_bytes(source, plan, settings))
        converter = _Converter(
            checkpoint, source, spec, plan, settings, Emitter(writer, source, plan, settings), report
        )
        if settings.method != "rtn":
            converter.start_calibration(calibration)
        converter.run(progress or (lambda done, total: None))
        converter.finish(writer)
    report.out_bytes = sum(file.stat().st_size for file in Path(out).glob("*.safetensors"))
    report.seconds = time.monotonic() - started
    return report


def layer_prefix(spec: ModelSpec, index: int) -> str:
    """What the names of one layer's tensors begin with."""
    return f"{spec.prefix}layers.{index}."


def _linear_shapes(source: WeightSource, spec: ModelSpec) -> dict[str, tuple[int, int]]:
    prefixes = [layer_prefix(spec, index) for index in range(spec.num_layers)]
    return {f"{prefix}{name}": shape for prefix in prefixes for name, shape in spec.linear_shapes().items()}


class _Converter:
    """One conversion: the source, the plan, the calibration data's way through the layers, and where tensors go."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: WeightSource,
        spec: ModelSpec,
        plan: Plan,
        settings: ConvertSettings,
        emitter: Emitter,
        report: ConvertReport,
    ) -> None:
        self.checkpoint, self.source, self.spec = checkpoint, source, spec
        self.plan, self.settings, self.emitter, self.report = plan, settings, emitter, report
        self.device = torch.device(settings.device)
        self.runner: CalibrationRunner | None = None
        self.gptq = GPTQSettings(order="act" if settings.desc_act else "static")

    @torch.no_grad()
    def start_calibration(self, text: str | os.PathLike[str] | None) -> None:
        """Tokenize the calibration text and embed it."""
        tokenizer = load_tokenizer(self.checkpoint.path)
        settings = self.settings
        length = min(settings.seq_len, self.spec.max_position)
        ids = sample_windows(
            tokenize(tokenizer, read_documents(text)),
            settings.samples,
            length,
            seed=settings.seed,
            vocab_size=self.spec.vocab_size,
            start=start_tokens(tokenizer),
        )
        embedding = self.source.tensor(f"{self.spec.prefix}embed_tokens.weight")
        hidden = torch.nn.functional.embedding(ids, embedding).float() * self.spec.embed_scale
        widest = max(max(shape) for shape in self.spec.linear_shapes().values())
        self.runner = CalibrationRunner(hidden, self.device, widest)
        self.report.calibration_tokens = ids.numel()

    @torch.no_grad()
    def run(self, progress: Progress) -> None:
        """Every tensor outside the layers, then layer after layer."""
        total = self.spec.num_layers
        progress(0, total)
        self.emitter.outside_layers([layer_prefix(self.spec, i) for i in range(total)])
        for index in range(total):
            self._layer(index)
            progress(index + 1, total)

    def _layer(self, index: int) -> None:
        prefix = layer_prefix(self.spec, index)
        layer_input = self._read_layer(prefix)
        result = LayerResult()
        if self.runner is None:
            quantize_nearest(layer_input, tuple(layer_input.schemes), result)
        else:
            layer = load_layer(self.source, self.spec, index, dtype=torch.float32, device=self.device, fuse=False)
            before = self.runner.preview(layer)
            quantize = self._gptq_layer if self.settings.method == "gptq" else self._awq_layer
            dropped = quantize(layer, layer_input, result, self.runner)
            self._note_dropped(dropped, layer_input.name, result)
            after = self.runner.hidden[:PREVIEW_WINDOWS] if dropped == 0 else None
            self.report.layer_errors.append(relative_error(after, before))
        self.emitter.layer(prefix, result, layer_input.weights)
        self.report.layers += result.records
        self.report.warnings += result.warnings

    def _read_layer(self, prefix: str) -> LayerInput:
        names = list(self.spec.linear_shapes())
        weights = {}
        for name in names:
            weight = self.source.tensor(f"{prefix}{name}.weight").to(self.device, torch.float32)
            if not bool(torch.isfinite(weight).all()):
                raise CheckpointError(
                    f"{prefix}{name}.weight: holds inf or NaN; the checkpoint is damaged, get it again"
                )
            weights[name] = weight
        schemes = {
            name: self.settings.scheme(self.plan.groups[prefix + name])
            for name in names
            if prefix + name in self.plan.groups
        }

        def norm_tensor(name: str) -> torch.Tensor | None:
            return self.source.tensor(prefix + name) if self.source.has(prefix + name) else None

        return LayerInput(prefix.rstrip("."), weights, schemes, norm_tensor, self.spec.norm_offset)

    def _awq_layer(
        self, layer: DecoderLayer, layer_input: LayerInput, result: LayerResult, runner: CalibrationRunner
    ) -> int:
        """All statistics in one pass over the layer's original weights; its inputs come from quantized layers."""
        ordered = stages(layer_input.weights)
        seen = runner.observe(layer, [stage[0] for stage in ordered])
        stats = {name: seen[stage[0]] for stage in ordered for name in stage}
        apply_folds(layer_input, find_folds(self.spec), stats, result)
        for stage in ordered:
            names = tuple(name for name in stage if name in layer_input.schemes)
            if self._usable(names, seen[stage[0]], layer_input, result):
                quantize_awq(layer_input, names, seen[stage[0]], result)
            self._install(layer, names, result)
        return runner.advance(layer)

    def _gptq_layer(
        self, layer: DecoderLayer, layer_input: LayerInput, result: LayerResult, runner: CalibrationRunner
    ) -> int:
        """Stage after stage: the inputs of each come from the quantized linears before it (true sequential order).

        Where one batch holds the calibration data, each stage is quantized on the way, in the middle of a single pass.
        """

        def quantize(stage: tuple[str, ...], stats: InputStats) -> None:
            names = tuple(name for name in stage if name in layer_input.schemes)
            if self._usable(names, stats, layer_input, result):
                quantize_gptq_stage(layer_input, names, stats, self.gptq, result)
            self._install(layer, names, result)

        def hook(stage: tuple[str, ...]) -> Callable[[torch.Tensor], None]:
            def see(x: torch.Tensor) -> None:
                stats = InputStats()
                stats(x)
                quantize(stage, stats)

            return see

        ordered = stages(layer_input.weights)
        if runner.one_batch:
            return runner.advance(layer, {stage[0]: hook(stage) for stage in ordered})
        for stage in ordered:
            quantize(stage, runner.observe(layer, [stage[0]])[stage[0]])
        return runner.advance(layer)

    @staticmethod
    def _usable(names: tuple[str, ...], stats: InputStats, layer_input: LayerInput, result: LayerResult) -> bool:
        """True if calibration saw finite inputs; otherwise the linears are rounded to nearest and named."""
        if not names:
            return False
        if stats.usable:
            return True
        why = "hold inf or NaN" if stats.rows or stats.bad_rows else "are missing, every sample before was dropped"
        for name in names:
            result.warnings.append(f"{layer_input.name}.{name}: its calibration inputs {why}; rounded to nearest")
        quantize_nearest(layer_input, names, result)
        return False

    def _install(self, layer: DecoderLayer, names: tuple[str, ...], result: LayerResult) -> None:
        linears = layer.linears()
        for name in names:
            linears[name].set_weight(result.effective(name))

    def _note_dropped(self, dropped: int, name: str, result: LayerResult) -> None:
        assert self.runner is not None, "only conversions with calibration drop samples"
        if dropped:
            self.report.dropped_samples += dropped
            result.warnings.append(
                f"{name}: outputs hold inf or NaN for {dropped} calibration samples, which are left out of the next "
                f"layers; {self.runner.samples} remain"
            )

    def finish(self, writer: FolderWriter) -> None:
        """Side files, the report, and config.json last."""
        extra = {"damp_percent": self.gptq.damp} if self.settings.method == "gptq" else {}
        quantization = quantization_config(self.settings, self.plan, __version__, extra)
        self.emitter.side_files(self.checkpoint, quantization)
        writer.add_json("report.json", {"qengine": __version__, **self.report.as_dict(timing=False)})
        writer.commit(self.emitter.config(self.checkpoint, quantization))

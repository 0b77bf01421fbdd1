"""One conversion: layer after layer, each finished on the disk before the next is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qengine import __version__
from qengine.checkpoint import Checkpoint
from qengine.convert.activations import Activations, fitting
from qengine.convert.behind import Behind
from qengine.convert.emit import Emitter
from qengine.convert.formats import Plan, quantization_config
from qengine.convert.head import head_stats, quantize_head
from qengine.convert.layer_methods import LayerMethods
from qengine.convert.layer_result import LayerResult
from qengine.convert.phases import phase
from qengine.convert.precision import full_precision
from qengine.convert.quantize_layer import LayerInput, quantize_nearest
from qengine.convert.readahead import read_ahead
from qengine.convert.report import ConvertReport, report_files
from qengine.convert.runner import CalibrationRunner, twin
from qengine.convert.scheme import Scheme
from qengine.convert.settings import ConvertSettings
from qengine.errors import CheckpointError
from qengine.layers.linear import Linear
from qengine.models import load_layer
from qengine.models.loading import load_final_norm
from qengine.models.spec import ModelSpec
from qengine.quant import WeightSource

HOLD_OUT = 1 / 8
"""Share of the calibration windows by which `best` judges."""


@dataclass(frozen=True)
class Job:
    """What is converted and how."""

    checkpoint: Checkpoint
    source: WeightSource
    spec: ModelSpec
    plan: Plan
    settings: ConvertSettings


def layer_prefix(spec: ModelSpec, index: int) -> str:
    """What the names of one layer's tensors begin with."""
    return f"{spec.prefix}layers.{index}."


class Converter:
    """Takes up where the emitter's writer stands: part 0 is all outside the layers, part i + 1 is layer i.

    windows: the calibration tokens, int64 [S, L]; None for a method that needs none.
    """

    def __init__(self, job: Job, emitter: Emitter, report: ConvertReport, windows: torch.Tensor | None) -> None:
        self.job = job
        self.emitter, self.writer, self.report = emitter, emitter.writer, report
        self.windows = windows
        self.device = torch.device(job.settings.device)
        self.methods = LayerMethods(job.settings, job.spec)
        self.runner: CalibrationRunner | None = None
        self.behind = Behind("writing")

    @torch.no_grad()
    def run(self, progress: Callable[[int, int], None]) -> None:
        """Every tensor outside the layers, then layer after layer; each goes to the disk beside the next one's work."""
        with self.behind:
            self._parts(progress)
            self.behind.wait()

    def _parts(self, progress: Callable[[int, int], None]) -> None:
        total = self.job.spec.num_layers
        if self.writer.finished:
            self.report.restore(self.writer.saved["report"])
        head = self.job.plan.head()
        if self.windows is not None and self.writer.finished <= total + (head is not None):
            with phase("embedding"):
                self._start_calibration(self.windows)
        first = max(self.writer.finished - 1, 0)
        progress(first, total)
        if not self.writer.finished:
            with phase("packing"):
                self.emitter.outside_layers([layer_prefix(self.job.spec, i) for i in range(total)])
            self._finish_part()
        for index in range(first, total):
            self._layer(index)
            self._finish_part()
            progress(index + 1, total)
        if head is not None and first <= total:
            self._head(head)
            self._finish_part()

    def _start_calibration(self, windows: torch.Tensor) -> None:
        """The states before the next layer: embedded tokens, or what the layer before left."""
        spec = self.job.spec
        shape = (windows.shape[0], windows.shape[1], spec.hidden_size)
        fits = [*fitting(shape, self.device, 2)]
        both = [Activations(shape, self.device, fits[i], partial(self._spill, i)) for i in range(2)]
        saved = self.writer.saved.get("states") if self.writer.finished else None
        if saved is not None:
            for states, file, total in zip(both, saved["files"], saved["sums"], strict=True):
                states.load(self.writer.folder / file, total)
                states.alive = list(saved["alive"])
        else:
            embedding = self.job.source.tensor(f"{spec.prefix}embed_tokens.weight")
            for row, ids in enumerate(windows):
                embedded = torch.nn.functional.embedding(ids, embedding).float() * spec.embed_scale
                for states in both:
                    states.write(row, embedded.unsqueeze(0))
            self.report.calibration_tokens = windows.numel()
        widest = max(max(shape) for shape in spec.linear_shapes().values())
        hold_out = HOLD_OUT if self.job.settings.method == "best" else 0.0
        self.runner = CalibrationRunner(both[0], both[1], widest, hold_out)
        self.runner.before_writing = self.behind.wait  # which may be reading the states

    def _spill(self, number: int) -> Path:
        return self.writer.folder / f"activations-{number}.bin"

    def _finish_part(self) -> None:
        """Start to save the states beside those that the last finished part goes by, and to make this part count."""
        self.behind.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        saved: dict[str, Any] = {"report": self.report.snapshot()}
        self.behind.start(partial(self._save_part, saved, self.writer.take_queued()))

    def _save_part(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        # part i + 1 is layer i, and while it is written layer i + 1 is worked on
        read_ahead(self.job.checkpoint, layer_prefix(self.job.spec, self.writer.finished + 1))
        if self.runner is not None and self.writer.finished > 0:
            files = [f"{kind}-{self.writer.finished % 2}.bin" for kind in ("states", "reference")]
            both = (self.runner.states, self.runner.reference)
            try:
                sums = [one.save(self.writer.folder / file) for one, file in zip(both, files, strict=True)]
            except OSError as error:
                raise self.writer.translate(error) from error
            saved["states"] = {"files": files, "sums": sums, "alive": self.runner.states.alive}
        self.writer.finish_part(saved, tensors)

    def _layer(self, index: int) -> None:
        job, prefix = self.job, layer_prefix(self.job.spec, index)
        result = LayerResult()
        if self.runner is None:
            layer_input = self._read_layer(prefix, {})
            quantize_nearest(layer_input, tuple(layer_input.schemes), result)
        else:
            with phase("reading"):
                source = load_layer(job.source, job.spec, index, dtype=torch.float32, device=self.device)
                layer = twin(source)
                layer_input = self._read_layer(prefix, source.linears())
            dropped, error = self.methods.quantize(layer, source, layer_input, result, self.runner)
            self._note_dropped(dropped, layer_input.name, result)
            self.report.layer_errors.append(error)
        with phase("packing"):
            self.emitter.layer(prefix, result, layer_input.weights)
        self.report.layers += result.records
        self.report.warnings += result.warnings
        job.checkpoint.tensors.close()  # mapped pages that were read count as memory until they are unmapped

    def _read_layer(self, prefix: str, linears: dict[str, Linear]) -> LayerInput:
        """The layer's tensors; those that `linears` hold as they are need no second copy."""
        source, names = self.job.source, list(self.job.spec.linear_shapes())
        weights = {}
        for name in names:
            held = linears[name].dense_weight() if name in linears else None
            weight = source.tensor(f"{prefix}{name}.weight").to(self.device, torch.float32) if held is None else held
            if not bool(torch.isfinite(weight).all()):
                raise CheckpointError(
                    f"{prefix}{name}.weight: holds inf or NaN; the checkpoint is damaged, get it again"
                )
            weights[name] = weight
        groups = self.job.plan.groups
        schemes = {n: self._scheme(prefix + n) for n in names if prefix + n in groups}

        def norm_tensor(name: str) -> torch.Tensor | None:
            return source.tensor(prefix + name) if source.has(prefix + name) else None

        return LayerInput(prefix.rstrip("."), weights, schemes, norm_tensor, self.job.spec.norm_offset)

    def _scheme(self, name: str) -> Scheme:
        bits, group, _ = self.job.plan.grid(name, self.job.settings)
        return self.job.settings.scheme(group, bits)

    def _head(self, name: str) -> None:
        job, stats = self.job, None
        if self.runner is not None:
            stats = head_stats(self.runner, load_final_norm(job.source, job.spec, torch.float32, self.device))
        own = job.source.has(f"{name}.weight")
        weight = job.source.tensor(f"{name}.weight" if own else f"{job.spec.prefix}embed_tokens.weight")
        settings = job.settings
        scheme, gptq = self._scheme(name), self.methods.gptq
        with full_precision(self.device):
            result = quantize_head(name, weight, scheme, stats, settings.method, gptq, self.device)
        self.emitter.head(name, result)
        self.report.layers += result.records
        self.report.warnings += result.warnings

    def _note_dropped(self, dropped: int, name: str, result: LayerResult) -> None:
        assert self.runner is not None, "only conversions with calibration drop samples"
        if dropped:
            self.report.dropped_samples += dropped
            result.warnings.append(
                f"{name}: outputs hold inf or NaN for {dropped} calibration samples, which are left out of the next "
                f"layers; {self.runner.samples} remain"
            )

    def finish(self) -> None:
        """Side files, the report, and config.json last."""
        job = self.job
        quantization = quantization_config(job.settings, job.plan, __version__, self.methods.facts())
        self.emitter.side_files(job.checkpoint, quantization)
        with phase("shards"):
            self.report.out_bytes = self.writer.join()
        for name, text in report_files(self.report).items():
            self.writer.add_bytes(name, text.encode("utf-8"))
        for file in self.writer.folder.glob("*.bin"):
            file.unlink()
        config = self.emitter.config(job.checkpoint, quantization)
        if job.plan.head() is not None:  # it is no longer the embedding
            config["tie_word_embeddings"] = False
        self.writer.commit(config)

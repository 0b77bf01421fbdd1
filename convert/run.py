"""Converts a plain checkpoint to a quantized one, one decoder layer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine.allocator import growing_segments
from qengine.checkpoint import open_checkpoint
from qengine.checkpoint.writer import SHARD_BYTES, refuse_source_as_target
from qengine.convert.calibration import load_tokenizer, read_documents, sample_windows, start_tokens, tokenize
from qengine.convert.converter import Converter, Job, layer_prefix
from qengine.convert.emit import Emitter, estimate_bytes
from qengine.convert.evaluate import evaluate_conversion
from qengine.convert.fingerprint import fingerprint
from qengine.convert.phases import phase
from qengine.convert.plan import make_plan
from qengine.convert.repack import repack_checkpoint
from qengine.convert.report import ConvertReport, report_files
from qengine.convert.settings import ConvertSettings, resolve_settings
from qengine.convert.workfolder import replace_text
from qengine.convert.writer import FolderWriter
from qengine.errors import UnsupportedError
from qengine.models import model_spec
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
    resume: bool = False,
    evaluate: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    **options: Any,
) -> ConvertReport:
    """Quantize `model` (a folder or hub id with plain weights) into the new folder `out`.

    options: those of `resolve_settings` (method, format, bits, group_size, sym, desc_act, samples, seq_len, seed,
    device, keep). calibration: a .txt or .jsonl file, None for the bundled text. progress(done, total) is called as
    layers finish. force: replace a folder that exists. resume: go on where a killed or interrupted conversion with the
    same options stopped, if there is one. evaluate: add perplexity before and after to the report. Equal options give
    equal bytes on equal machines, in one run or in several.

    A checkpoint that is quantized already is repacked in the format that is given (see repack.py), without a change of
    any weight; the other options mean nothing then.

    Raises ConfigError, CheckpointError, UnsupportedError or CapacityError, and then leaves `out` as it was.
    """
    settings = resolve_settings(**options)
    checkpoint = open_checkpoint(model)
    refuse_source_as_target(Path(out), checkpoint.path)
    source = open_weights(checkpoint)
    source.check()
    folder: dict[str, Any] = {"force": force, "resume": resume, "shard_bytes": shard_bytes}
    if source.method is None:
        return _convert_plain(model, out, settings, source, calibration, evaluate, progress, folder)
    if options.get("format") is None:
        raise UnsupportedError(
            f"{checkpoint.path}: is quantized already ({source.method}); pack the same numbers otherwise with "
            f"--format, or make a plain copy first: qengine dequantize {checkpoint.path} --out DIR"
        )
    return repack_checkpoint(
        checkpoint, source, out, format=settings.format, model=str(model), progress=progress, **folder
    )


def _convert_plain(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    settings: ConvertSettings,
    source: WeightSource,
    calibration: str | os.PathLike[str] | None,
    evaluate: bool,
    progress: Progress | None,
    folder: dict[str, Any],
) -> ConvertReport:
    """Quantize what is not quantized yet; folder: options of FolderWriter."""
    started = time.monotonic()
    if settings.device.startswith("cuda"):
        growing_segments()  # every phase of a layer wants pieces of other sizes
    checkpoint = source.checkpoint
    spec = model_spec(checkpoint)
    check_weights(source, spec)
    plan, notes = make_plan(linear_shapes(source, spec, settings), settings)
    job = Job(checkpoint, source, spec, plan, settings)
    with phase("calibration text"):
        windows = None if settings.method == "rtn" else calibration_windows(job, calibration)
    report = ConvertReport(str(model), Path(out), settings, plan.group_size, checkpoint.disk_bytes(), warnings=notes)
    same = fingerprint(checkpoint, str(model), settings, windows)
    writer = FolderWriter(Path(out), fingerprint=same, **folder)
    _quantize(job, writer, report, windows, progress or (lambda done, total: None))
    report.seconds = time.monotonic() - started
    if evaluate:
        report.evaluation = evaluate_conversion(checkpoint.path, Path(out), torch.device(settings.device), progress)
        for name, text in report_files(report).items():
            replace_text(Path(out) / name, text)
    return report


def _quantize(
    job: Job, writer: FolderWriter, report: ConvertReport, windows: torch.Tensor | None, progress: Progress
) -> None:
    """All layers, or those that are left, then the folder in its place."""
    with writer:
        writer.require_space(estimate_bytes(job.source, job.plan, job.settings, job.spec, windows))
        converter = Converter(job, Emitter(writer, job.source, job.plan, job.settings), report, windows)
        converter.run(progress)
        converter.finish()


def linear_shapes(source: WeightSource, spec: ModelSpec, settings: ConvertSettings) -> dict[str, tuple[int, int]]:
    """(N, K) of what is to be quantized: the layers' linears, and the output head if it was named."""
    prefixes = [layer_prefix(spec, index) for index in range(spec.num_layers)]
    shapes = {f"{prefix}{name}": shape for prefix in prefixes for name, shape in spec.linear_shapes().items()}
    if settings.kept_bits(spec.head_name) not in (None, 16):
        shapes[spec.head_name] = (spec.vocab_size, spec.hidden_size)
    return shapes


def calibration_windows(job: Job, text: str | os.PathLike[str] | None) -> torch.Tensor:
    """The calibration windows' token ids, int64 [samples, length]."""
    spec, settings = job.spec, job.settings
    documents = read_documents(text)
    tokenizer = load_tokenizer(job.checkpoint.path)
    return sample_windows(
        tokenize(tokenizer, documents),
        settings.samples,
        min(settings.seq_len, spec.max_position),
        seed=settings.seed,
        vocab_size=spec.vocab_size,
        start=start_tokens(tokenizer),
    )

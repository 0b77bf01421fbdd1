"""A conversion by another library: our calibration windows and settings in, a folder that we have loaded out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import open_checkpoint
from qengine.checkpoint.writer import new_folder, refuse_source_as_target
from qengine.convert.backends.job import PeerJob
from qengine.convert.backends.launch import run_peer
from qengine.convert.backends.options import BACKENDS, backend_settings
from qengine.convert.backends.report import PeerReport
from qengine.convert.converter import Job
from qengine.convert.evaluate import evaluate_conversion, streamed_perplexity
from qengine.convert.formats import Plan
from qengine.convert.plan import make_plan
from qengine.convert.run import calibration_windows, linear_shapes
from qengine.convert.settings import ConvertSettings
from qengine.errors import CheckpointError, UnsupportedError
from qengine.models import model_spec
from qengine.models.loading import check_weights
from qengine.quant import WeightSource, open_weights
from qengine.quant.export import copy_side_files
from qengine.quant.weights import QuantizedWeight

CHECK_WINDOWS = 2
"""Calibration windows on which the result is held against the source."""

RUINED = 2.0
"""Growth of their perplexity from which on the report doubts the weights: 2 bits come near to it, 4 never."""


def convert_with_backend(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    backend: str,
    calibration: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: bool = False,
    evaluate: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> PeerReport:
    """Have a peer's own quantizer (autoawq, optimum, gptqmodel) write the new folder `out`.

    options: those of `resolve_settings`; method None is the peer's own. calibration, force, evaluate and progress are
    those of `convert_checkpoint`, and the windows of tokens are the same that it would draw. The peer runs in a process
    of its own, its output on stderr. What it wrote is opened, every linear dequantized, and its perplexity on the first
    windows held against the source's, before the folder appears.

    Raises ConfigError for what the peer cannot honour and for a peer that is not installed, and UnsupportedError,
    CheckpointError or CapacityError where it fails or writes what we cannot load; `out` is as it was then.
    """
    settings = backend_settings(backend, resume=resume, **options)
    started = time.monotonic()
    job, notes = _prepare(model, Path(out), backend, settings)
    windows = calibration_windows(job, calibration)
    report = PeerReport(backend, str(model), Path(out), settings, job.plan.group_size, warnings=notes)
    report.source_bytes, report.calibration_tokens = job.checkpoint.disk_bytes(), windows.numel()
    with new_folder(Path(out), force=force) as folder:
        answer = run_peer(_peer_job(backend, job, folder, windows), settings.device)
        report.versions, report.quantizer_seconds = answer["versions"], answer["seconds"]
        copy_side_files(job.checkpoint.path, folder)
        _check_result(job, folder, report)
        _compare(job, folder, windows[:CHECK_WINDOWS], report)
        if evaluate:
            device = torch.device(settings.device)
            report.evaluation = evaluate_conversion(job.checkpoint.path, folder, device, progress)
        report.out_bytes = open_checkpoint(folder).disk_bytes()
        (folder / "report.json").write_text(report.text(), encoding="utf-8")
    report.seconds = time.monotonic() - started
    return report


def _prepare(
    model: str | os.PathLike[str], out: Path, backend: str, settings: ConvertSettings
) -> tuple[Job, list[str]]:
    """The opened source and a plan that the peer can follow: one grid for all linears of the layers."""
    checkpoint = open_checkpoint(model)
    refuse_source_as_target(out, checkpoint.path)
    source = open_weights(checkpoint)
    source.check()
    if source.method is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: is quantized already ({source.method}), and {BACKENDS[backend].title} wants plain "
            f"weights; make a plain copy first: qengine dequantize {checkpoint.path} --out DIR"
        )
    spec = model_spec(checkpoint)
    check_weights(source, spec)
    plan, notes = make_plan(linear_shapes(source, spec, settings), settings)
    _require_uniform(plan, backend)
    return Job(checkpoint, source, spec, plan, settings), notes


def _require_uniform(plan: Plan, backend: str) -> None:
    title = BACKENDS[backend].title
    if plan.plain:
        name, reason = next(iter(plan.plain.items()))
        raise UnsupportedError(
            f"{name}: {reason}, and {title} quantizes every layer; choose another --group-size, or convert without "
            "--backend, which leaves such layers as they are"
        )
    other = next((name for name, group in plan.groups.items() if group != plan.group_size), None)
    if other is not None:
        raise UnsupportedError(
            f"{other}: needs groups of {plan.groups[other]}, others of {plan.group_size}, and {title} has one size for "
            "all; choose a --group-size that divides every width, or convert without --backend"
        )


def _peer_job(backend: str, job: Job, folder: Path, windows: torch.Tensor) -> PeerJob:
    settings = job.settings
    return PeerJob(
        backend=backend,
        source=str(job.checkpoint.path.resolve()),
        out=str(folder),
        windows=windows.tolist(),
        method=settings.method,
        format=settings.format,
        bits=settings.bits,
        group_size=job.plan.group_size,
        sym=settings.sym,
        desc_act=settings.desc_act,
        device=torch.device(settings.device).type,
        seed=settings.seed,
    )


def _check_result(job: Job, folder: Path, report: PeerReport) -> None:
    """Every linear of the plan is there, quantized as asked, and dequantizes to finite numbers."""
    made = open_weights(open_checkpoint(folder))
    made.check()
    check_weights(made, model_spec(made.checkpoint))
    quantized = set(made.quantized_modules())
    for name in job.plan.groups:
        if name not in quantized:
            report.warnings.append(f"{name}: {report.backend} left it unquantized")
            continue
        _check_linear(made, name, job)
        report.linears += 1
        made.checkpoint.tensors.close()
    if not report.linears:
        raise CheckpointError(f"--backend {report.backend}: what it wrote holds no quantized layer; nothing is kept")


def _check_linear(made: WeightSource, name: str, job: Job) -> None:
    weight = made.linear(name)
    assert isinstance(weight, QuantizedWeight), f"{name}: listed as quantized"
    rows, columns = job.source.linear_shape(name)
    group = columns if job.plan.group_size == -1 else job.plan.group_size
    got = (tuple(weight.shape), weight.spec.bits, weight.scales.shape[1])
    wanted = ((rows, columns), job.settings.bits, -(-columns // group))
    if got != wanted:
        raise CheckpointError(
            f"{name}: shape, bits and groups are {got}, {wanted} were asked for; the library did not do what it was "
            "told, nothing is kept"
        )
    if not bool(torch.isfinite(weight.dequantize(torch.float32)).all()):
        raise CheckpointError(f"{name}: holds inf or NaN after quantization; nothing is kept. Try other settings")


def _compare(job: Job, folder: Path, windows: torch.Tensor, report: PeerReport) -> None:
    device = torch.device(job.settings.device)
    report.before, report.after = (
        streamed_perplexity(open_checkpoint(path), windows, device) for path in (job.checkpoint.path, folder)
    )
    if not report.after < RUINED * report.before:
        report.warnings.append(
            f"perplexity on the calibration text grew from {report.before:.4g} to {report.after:.4g}: the weights are "
            "probably ruined; compare with a conversion without --backend"
        )

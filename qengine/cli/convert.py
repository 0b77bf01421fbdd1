"""`qengine convert`: a plain model to INT4."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qengine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from qengine.convert.backends.report import PeerReport
    from qengine.convert.report import ConvertReport


class Method(str, Enum):
    """How weights are rounded."""

    rtn = "rtn"
    awq = "awq"
    gptq = "gptq"
    best = "best"


class Backend(str, Enum):
    """Whose quantizer does it."""

    autoawq = "autoawq"
    optimum = "optimum"
    gptqmodel = "gptqmodel"


class Format(str, Enum):
    """How the result is packed."""

    awq_gemm = "awq-gemm"
    gptq = "gptq"
    gptq_v2 = "gptq_v2"
    compressed_tensors = "compressed-tensors"


def convert(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a model with plain weights.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    method: Annotated[
        Method | None,
        typer.Option(
            help="awq: scales and clips by activations. gptq: compensates. best: both. rtn: rounds. "
            "\\[default: awq; gptq with --backend optimum or gptqmodel]",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="2, 3, 4 or 8; awq-gemm has 4 only.")] = 4,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale; -1 for the whole row.")] = 128,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BITS",
            help="Other bits for modules whose name holds NAME (a regular expression); 16 leaves them. "
            "lm_head=8 quantizes the output head. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    sym: Annotated[
        bool | None,
        typer.Option(
            "--sym/--asym",
            help="Fixed or free zero points. \\[default: sym for gptq and compressed-tensors]",
            show_default=False,
        ),
    ] = None,
    desc_act: Annotated[
        bool, typer.Option("--desc-act", help="GPTQ groups in order of importance (needs g_idx).")
    ] = False,
    format: Annotated[
        Format | None, typer.Option(help="\\[default: awq-gemm; gptq: gptq, with --asym gptq_v2]", show_default=False)
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help='.txt, .jsonl or .parquet with "text" or "messages", or dataset:NAME\\[:CONFIG]\\[@SPLIT]. '
            "\\[default: bundled]",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration windows. \\[default: 16 on a CPU, 128 on a GPU]", show_default=False)
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a window.")] = 512,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Draws the calibration windows.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the same command was killed or interrupted.")
    ] = False,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Perplexity before and after, in the report.")] = False,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Another library's own quantizer, where it is installed.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a model to a folder that transformers, GPTQModel, vLLM and qengine load.

    The folder appears only when it is whole. A run that is killed leaves nothing at --out, but its finished layers in a
    hidden folder beside it: the same command with --resume goes on from there, and gives the same files.

    [bold]Examples[/]

      qengine convert ./SmolLM2-135M-Instruct --out smol-awq --group-size 64

      qengine convert ./llama --out llama-gptq --method gptq --sym --device cuda

      qengine convert ./qwen --out qwen-ct --format compressed-tensors --calibration my-texts.jsonl

      qengine convert ./llama --out llama-theirs --backend gptqmodel --group-size 64
    """
    from rich.console import Console

    options: dict[str, Any] = {
        "format": format.value if format else None,
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "calibration": calibration,
        "samples": samples,
        "seq_len": seq_len,
        "device": device,
        "seed": seed,
        "force": force,
        "resume": resume,
        "keep": _kept(keep or []),
        "evaluate": evaluate,
    }
    if method is not None:
        options["method"] = method.value
    report = _run(model, out, backend, options, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    elif backend is not None:
        _print_peer_summary(report, Console())
    else:
        _print_summary(report, Console())


def _run(model: str, out: Path, backend: Backend | None, options: dict[str, Any], console: Console) -> Any:
    """The report, ours or a peer's. A peer has progress bars of its own, so ours is not shown beside them."""
    if backend is not None:
        from qengine.convert.backends.convert import convert_with_backend

        return convert_with_backend(model, out, backend=backend.value, **options)
    from qengine.convert.run import convert_checkpoint

    with _Bar(console) as bar:
        return convert_checkpoint(model, out, progress=bar.update, **options)


def _kept(pairs: list[str]) -> dict[str, int]:
    kept = {}
    for pair in pairs:
        name, _, bits = pair.rpartition("=")
        if not name or not bits.isdecimal():
            raise ConfigError(f"--keep {pair}: give a part of a module's name and its bits, such as lm_head=8")
        kept[name] = int(bits)
    return kept


class _Bar:
    """A progress bar over layers, with the time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("elapsed"))
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("reading", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` layers are finished."""
        self._progress.update(self._task, completed=done, total=total, description="layers")


def _print_summary(report: ConvertReport, console: Console) -> None:
    from rich.table import Table

    settings = report.settings
    kind = "sym" if settings.sym else "asym"
    grid = f"{settings.bits} bits, groups of {report.group_size}, {kind}"
    console.print(f"{report.out}: {settings.method}, {settings.format}, {grid}")
    table = Table("linear", "output error", "round-to-nearest", "weight error")
    for name, errors in report.errors_by_kind().items():
        cells = [
            f"{100 * errors[key]:.3f} %" if key in errors else "-" for key in ("error", "rtn_error", "weight_error")
        ]
        table.add_row(name, *cells)
    console.print(table)
    _print_totals(report, console)


def _print_peer_summary(report: PeerReport, console: Console) -> None:
    settings = report.settings
    kind = "sym" if settings.sym else "asym"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    grid = f"{settings.bits} bits, groups of {report.group_size}, {kind}"
    console.print(f"{report.out}: {settings.method} by {report.backend}, {settings.format}, {grid}")
    console.print(f"{versions}; its quantizer took {report.quantizer_seconds:.1f} s", highlight=False)
    console.print(
        f"{report.linears} linears load; perplexity on the calibration text {report.before:.3f} -> {report.after:.3f}"
    )
    _print_totals(report, console)


def _print_totals(report: ConvertReport | PeerReport, console: Console) -> None:
    minutes, seconds = divmod(report.seconds, 60)
    sizes = f"{report.source_bytes / 1e6:.1f} MB -> {report.out_bytes / 1e6:.1f} MB"
    console.print(f"weights {sizes} in {int(minutes)} min {seconds:.1f} s")
    if report.evaluation is not None:
        console.print(f"perplexity {report.evaluation.before:.3f} -> {report.evaluation.after:.3f}")
    for warning in report.warnings:
        console.print(f"[yellow]note:[/] {warning}", highlight=False, soft_wrap=True)

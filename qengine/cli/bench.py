"""`qengine bench`: how fast this machine serves a model, under the loads that other engines were measured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.bench.loads import ABOUT, NAMES
from qengine.cli.options import DEFAULTS, Device
from qengine.errors import ConfigError

if TYPE_CHECKING:
    from qengine.bench.loads import Sizes


def bench(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="MODEL", help="A model folder or hub id, or --shape.", show_default=False),
    ] = None,
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Random INT4 weights of this shape, made on the device: llama-2-7b, qwen2.5-7b, ..."),
    ] = None,
    loads: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = ",".join(NAMES),
    size: Annotated[str, typer.Option(help="full (as vLLM was measured), t4 (minutes on a T4) or quick.")] = "full",
    quick: Annotated[bool, typer.Option("--quick", help="The same as --size quick.")] = False,
    memory_gib: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Most GPU memory of the process, as NVML counts it: 14.6 plays a T4."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float16, int8, int4 or fp8.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float16, bfloat16; float32 on a CPU.")] = "auto",
    device: Device = DEFAULTS["device"],
    max_model_len: Annotated[int, typer.Option(help="Most tokens of a sequence.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = DEFAULTS["max_num_seqs"],
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = DEFAULTS[
        "max_num_batched_tokens"
    ],
    block_size: Annotated[int, typer.Option(help="Tokens a cache block.")] = DEFAULTS["block_size"],
    embedding_on_host: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Embedding table in CPU memory (default: by the card's size)."),
    ] = None,
    lm_head_dtype: Annotated[str, typer.Option(help="auto, model or int8.")] = "auto",
    pool_tokens: Annotated[int, typer.Option(help="Cache of the oversubscribed load.")] = 8192,
    swap_space: Annotated[float, typer.Option(help="GiB of CPU memory for the oversubscribed load.")] = 4.0,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    predict: Annotated[bool, typer.Option(help="The cost model's figures beside the measured ones.")] = True,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for JSON, Markdown and PNG (default: none is written)."),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="Name of the files (default: by model and cache).")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Measure latency, throughput, oversubscribed load, start-up and memory of a model on this machine.

    `qengine bench serve` measures a running server instead.

    The loads are those that vLLM was measured with, token for token; on an H200 its figures are printed beside. Exit
    code 1 if a load failed; the others are run and written all the same.

    Examples:

      qengine bench ./Qwen2.5-7B-Instruct-AWQ --loads latency,mixed

      qengine bench --shape llama-2-7b --memory-gib 14.6 --kv-cache-dtype int8 --out results
    """
    if (model is None) == (shape is None):
        raise ConfigError("give a model (folder or hub id) or --shape NAME, and not both")
    from qengine.bench.report import plot, save, show
    from qengine.bench.serving import Options, run_benchmark
    from qengine.random_model import PREFIX, shape_config

    if shape is not None:
        shape_config(shape)  # an unknown one is refused before anything is done
        model = PREFIX + shape.removeprefix(PREFIX).lower()
    assert model is not None, "either was given"
    settings: dict[str, Any] = {
        "device": device, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "gpu_memory_limit": memory_gib,
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size, "embedding_on_host": embedding_on_host, "lm_head_dtype": lm_head_dtype,
        "enforce_eager": enforce_eager,
    }  # fmt: skip
    options = Options(
        model, settings, tuple(part.strip() for part in loads.split(",") if part.strip()),
        _sizes("quick" if quick else size), pool_tokens, swap_space, predict=predict,
    )  # fmt: skip
    label = name or f"serving_{Path(model.replace(':', '_')).name}_{kv_cache_dtype}".lower()
    keep: Callable[[dict[str, Any]], None] = lambda report: save(report, out, label) if out else None  # noqa: E731
    with _progress(len(options.loads)) as say:
        report = run_benchmark(options, say, keep).as_json()
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if out is not None:
        problem = plot(report, out / f"{label}.png")
        print(problem or f"written: {out / label}.json, .md, .png", file=sys.stderr)
    if report["failed"]:
        raise typer.Exit(1)


def _sizes(name: str) -> Sizes:
    from qengine.bench.loads import FULL, QUICK, T4

    known = {"full": FULL, "t4": T4, "quick": QUICK}
    if name not in known:
        raise ConfigError(f"size={name!r} is not known; give one of {', '.join(known)}")
    return known[name]


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Yields say(text): what is going on. A spinner with the time on a terminal, lines on stderr elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)
        titles = set(ABOUT.values())
        seen: list[str] = []

        def say(text: str) -> None:
            # A load's own title means that those before it are done.
            bar.update(task, description=text, completed=len(seen))
            if text in titles:
                seen.append(text)

        yield say

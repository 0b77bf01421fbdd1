"""`qengine bench serve`: load on a running server, or on one that is started for the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.errors import ConfigError, QEngineError

if TYPE_CHECKING:
    from qengine.bench.serve.client import Outcome
    from qengine.bench.serve.options import LoadOptions

LOAD = "Load"


def _load(help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=LOAD, metavar=metavar)


def bench_serve(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    start: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="MODEL", help="Start `qengine serve MODEL` for the run instead."),
    ] = None,
    server_args: Annotated[str, typer.Option(help="Options for that server, in one string.")] = "",
    model: Annotated[Optional[str], typer.Option(help="Its name (default: the first that is listed).")] = None,  # noqa: UP045
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="The server's key."),
    ] = None,
    endpoint: Annotated[str, _load("completions or chat.")] = "completions",
    num_prompts: Annotated[int, _load("Requests in all.")] = 100,
    request_rate: Annotated[float, _load("Arrivals a second; inf: all at once.", metavar="R")] = math.inf,
    burstiness: Annotated[float, _load("1: Poisson arrivals; less: bursts; more: even.", metavar="X")] = 1.0,
    max_concurrency: Annotated[
        Optional[int],  # noqa: UP045
        _load("Most requests under way; the others wait at the client.", metavar="N"),
    ] = None,
    input_len: Annotated[str, _load("Tokens of random prompts: a number, or a range.", metavar="N[-M]")] = "256",
    output_len: Annotated[str, _load("Tokens to generate for them.", metavar="N[-M]")] = "128",
    vocab_size: Annotated[
        Optional[int],  # noqa: UP045
        _load("Random token ids are below it (default: by --start's model, else 30000).", metavar="N"),
    ] = None,
    dataset: Annotated[
        Optional[Path],  # noqa: UP045
        _load("A ShareGPT-style JSON file instead of random prompts.", metavar="FILE"),
    ] = None,
    ignore_eos: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            rich_help_panel=LOAD,
            help="Generate all tokens asked for (default: with random prompts).",
        ),
    ] = None,
    temperature: Annotated[float, _load("Of sampling.", metavar="X")] = 0.0,
    goodput: Annotated[
        Optional[list[str]],  # noqa: UP045
        _load("Limits in ms that a good request meets: ttft:500 tpot:50 itl:100 e2e:9000.", metavar="NAME:MS..."),
    ] = None,
    warmup: Annotated[int, _load("Requests before those that are measured.", metavar="N")] = 1,
    timeout: Annotated[float, _load("Seconds for one request.", metavar="S")] = 600.0,
    seed: Annotated[int, _load("Of lengths, prompts and arrivals.", metavar="N")] = 0,
    out: Annotated[Optional[Path], typer.Option(help="Folder for JSON and PNG (default: none is written).")] = None,  # noqa: UP045
    name: Annotated[str, typer.Option(help="Name of the files.")] = "serve",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Send streamed requests to a server with OpenAI's API and measure what its clients see.

    Time to the first token, per token, between chunks and of whole requests at mean, P50, P90 and P99, throughput,
    goodput, and each failure by kind. Exit code 1 if a request failed.

    Examples:

      qengine bench serve --request-rate 8 --num-prompts 500 --input-len 32-1024 --output-len 32-512

      qengine bench serve --start ./Qwen2.5-7B-Instruct-AWQ --endpoint chat --goodput ttft:500 tpot:50

      qengine bench serve --dataset ShareGPT.json --max-concurrency 64 --out results
    """
    from qengine.bench.serve.options import LoadOptions, parse_goodput, parse_lengths

    stray = [text for text in context.args if goodput is None or ":" not in text]
    if stray:
        raise ConfigError(f"{stray[0]!r} is not understood; MODEL goes after --start, limits after --goodput")
    options = LoadOptions(
        base_url=base_url, model=model, endpoint=endpoint, num_prompts=num_prompts, request_rate=request_rate,
        burstiness=burstiness, max_concurrency=max_concurrency, input_len=parse_lengths(input_len, "input_len"),
        output_len=parse_lengths(output_len, "output_len"), vocab_size=_vocabulary(vocab_size, start), dataset=dataset,
        ignore_eos=dataset is None if ignore_eos is None else ignore_eos, temperature=temperature, timeout=timeout,
        goodput=parse_goodput([*(goodput or ()), *context.args]), warmup=warmup, api_key=api_key, seed=seed,
    )  # fmt: skip
    if start is None and server_args:
        raise ConfigError("--server-args go with --start MODEL")
    report = _run(options, start, shlex.split(server_args), out, name, as_json)
    if report["failed"]:
        raise typer.Exit(1)


def _vocabulary(given: int | None, start: str | None) -> int:
    from qengine.bench.serve.options import LoadOptions
    from qengine.bench.serve.process import vocabulary

    found = given or (vocabulary(start) if start is not None else None)
    return found or LoadOptions.vocab_size


def _run(
    options: LoadOptions, start: str | None, arguments: list[str], out: Path | None, name: str, as_json: bool
) -> dict[str, Any]:
    """Measure and report."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise QEngineError("aiohttp is not installed; pip install 'qengine[bench]'") from None
    from qengine.bench.serve.process import running_server
    from qengine.bench.serve.report import plot, show
    from qengine.bench.serve.run import measure
    from qengine.bench.serve.summary import summary

    with contextlib.ExitStack() as stack:
        say, done = stack.enter_context(_progress(options.num_prompts))
        if start is not None:
            say(f"starting a server for {start}")
            key = ["--api-key", options.api_key] if options.api_key else []
            options = replace(options, base_url=stack.enter_context(running_server(start, [*arguments, *key])))
        measured = asyncio.run(measure(options, say, done))
    report = summary(measured) | {"server_args": arguments if start is not None else None}
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if out is not None:
        from qengine.checkpoint.writer import write_json

        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{name}.json", report)
        problem = plot(measured, report, out / f"{name}.png")
        print(problem or f"written: {out / name}.json, .png", file=sys.stderr)
    return report


@contextmanager
def _progress(count: int) -> Iterator[tuple[Callable[[str], None], Callable[[Outcome], None]]]:
    """Yields say(text) and done(outcome): a bar on a terminal, lines on stderr elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True), lambda outcome: None
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
    failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)

        def done(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            bar.update(task, advance=1, description=f"[red]{failed} failed[/]" if failed else None)

        yield lambda text: bar.update(task, description=text), done

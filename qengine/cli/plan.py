"""`qengine plan`: does it fit, what goes where, how many users, how fast: before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.cli.options import DEFAULTS
from qengine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from qengine.checkpoint import Checkpoint
    from qengine.plan import Plan

COLOURS = {
    "layers": "blue",
    "head": "cyan",
    "embedding": "magenta",
    "step": "yellow",
    "graphs": "bright_black",
    "context": "red",
    "margin": "white",
    "cache": "green",
}
MEANING = {
    "layers": "weights of the decoder layers",
    "head": "output head",
    "embedding": "embedding table",
    "step": "activations and logits of the largest step (estimate)",
    "graphs": "CUDA graphs (estimate)",
    "context": "CUDA context and kernels (estimate)",
    "margin": "left free",
    "cache": "KV cache",
}
WIDTH = 60


def plan(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="MODEL", help="A model folder or hub id, or --shape.", show_default=False),
    ] = None,
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Instead of a model: llama-2-7b, qwen2.5-7b, ... as INT4, group 128."),
    ] = None,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="t4, rtx2060, a10, l4, ... (default: this machine's, else t4)."),
    ] = None,
    memory: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="GiB that the process may take (default: --gpu-memory-utilization of the card)."),
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the card.")] = DEFAULTS[
        "gpu_memory_utilization"
    ],
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float16, int8, int4 or fp8.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float16 or bfloat16.")] = "auto",
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Most tokens of a sequence (default: the model's)."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = DEFAULTS["max_num_seqs"],
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = DEFAULTS[
        "max_num_batched_tokens"
    ],
    block_size: Annotated[int, typer.Option(help="Tokens a cache block.")] = DEFAULTS["block_size"],
    embedding_on_host: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Embedding table in CPU memory (default: on cards under 24 GiB)."),
    ] = None,
    lm_head_dtype: Annotated[str, typer.Option(help="auto, model or int8.")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit on the hub.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a model fits a card, what of it goes where, how many tokens and users the cache holds, and how fast
    it would be.

    Only headers are read, also of a model on the hub, of which kilobytes are fetched. Sizes of weights and cache are
    exact, those marked are estimates, speeds are predictions of the cost model (kernels/cost.py). Exit code 1 if it
    does not fit.

    Examples:

      qengine plan ./Qwen2.5-7B-Instruct-AWQ --gpu t4

      qengine plan Qwen/Qwen2.5-14B-Instruct-AWQ --gpu rtx3060

      qengine plan --shape llama-2-7b --memory 11 --kv-cache-dtype int8 --json
    """
    from qengine.plan import PlanOptions, plan_model

    options = PlanOptions(
        memory, gpu_memory_utilization, dtype, kv_cache_dtype, block_size, max_model_len, max_num_seqs,
        max_num_batched_tokens, embedding_on_host, lm_head_dtype, enforce_eager,
    )  # fmt: skip
    check(options.__dict__)
    found = plan_model(open_model(model, shape, revision), choose_card(gpu, memory), options, name=model)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        show(found)
    if not found.fits:
        raise typer.Exit(1)


def check(values: dict[str, Any]) -> None:
    """Raise ConfigError for numbers that are not allowed."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if values[name] is not None and values[name] < 1:
            raise ConfigError(f"{name}={values[name]} is not allowed; give at least 1")
    if not 0 < values["gpu_memory_utilization"] <= 1:
        raise ConfigError(
            f"gpu_memory_utilization={values['gpu_memory_utilization']} is not allowed; give a number in (0, 1]"
        )
    if values["memory_gib"] is not None and values["memory_gib"] <= 0:
        raise ConfigError(f"memory={values['memory_gib']} is not allowed; give GiB, more than 0")
    if values["lm_head_dtype"] not in ("auto", "model", "int8"):
        raise ConfigError(f"lm_head_dtype={values['lm_head_dtype']!r} is not allowed; give 'auto', 'model' or 'int8'")


def open_model(model: str | None, shape: str | None, revision: str | None) -> Checkpoint:
    """The checkpoint to plan for. Raises ConfigError and CheckpointError."""
    from qengine.plan.remote import open_headers
    from qengine.random_model import is_random, random_checkpoint

    if (model is None) == (shape is None):
        raise ConfigError("give a model (folder or hub id) or --shape NAME, and not both")
    if shape is not None:
        return random_checkpoint(shape, "cpu")
    assert model is not None, "either was given"
    return random_checkpoint(model, "cpu") if is_random(model) else open_headers(model, revision)


def choose_card(gpu: str | None, memory: float | None) -> Any:
    """The card named, or this machine's, or a T4; --memory beyond a T4's, alone, is taken as the card's size."""
    from dataclasses import replace

    from qengine.plan.cards import REFERENCE, find_card, this_card

    if gpu is not None:
        return find_card(gpu)
    card = this_card() or find_card(REFERENCE)
    return card if memory is None or memory <= card.memory_gib else replace(card, memory_gib=memory)


def show(found: Plan) -> None:
    """The plan for a person: where the memory goes, users, predictions, advice."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    memory, gib = found.memory, 2**30
    console.print(f"[bold]{escape(found.model)}[/] on {found.card.name}, {memory.limit / gib:.2f} GiB for the process")
    head = ", int8 head" if found.choices["int8_head"] else ""
    console.print(f"{found.architecture}, {found.choices['quantization'] or 'not quantized'}, {found.dtype}{head}")
    if found.fits:
        tokens = found.cache[found.kind]["tokens"]
        console.print(
            f"[bold green]fits[/]: {tokens:,} tokens of {found.kind} cache, {found.max_model_len:,} a sequence"
        )
    else:
        console.print(f"[bold red]does not fit[/]: {-memory.free / gib:.2f} GiB are missing before any cache")
    _memory(console, found)
    if found.fits:
        _users(console, found)
        _speeds(console, found)
    for line in found.advice:
        console.print(f"[yellow]·[/] {escape(line)}")


def _memory(console: Console, found: Plan) -> None:
    """One bar for the whole limit, and a line for each part of it."""
    from rich.table import Table
    from rich.text import Text

    gib = 2**30
    parts = {**found.memory.parts, "cache": max(0, found.memory.free)}
    whole = max(found.memory.limit, sum(parts.values()))
    strip, drawn, passed = Text(), 0, 0
    for name, size in parts.items():
        passed += size
        cells = round(WIDTH * passed / whole) - drawn
        strip.append("█" * cells, style=COLOURS[name])
        drawn += cells
    console.print(strip)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, size in parts.items():
        if size:
            table.add_row(Text("■ " + name, style=COLOURS[name]), f"{size / gib:.2f} GiB", MEANING[name])
    for name, size in found.memory.host.items():
        if size:
            table.add_row(f"  {name}", f"{size / gib:.2f} GiB", f"{MEANING[name]}, in pinned CPU memory")
    console.print(table)


def _users(console: Console, found: Plan) -> None:
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, title="users at once, by tokens each (prompt and output)", title_justify="left"
    )
    table.add_column("cache")
    table.add_column("tokens", justify="right")
    lengths = list(found.cache[found.kind]["users"])
    for length in lengths:
        table.add_column(f"{int(length):,}", justify="right")
    for kind, row in found.cache.items():
        style = "bold" if kind == found.kind else None
        table.add_row(kind, f"{row['tokens']:,}", *(f"{row['users'][n]:,}" for n in lengths), style=style)
    console.print(table)


def _speeds(console: Console, found: Plan) -> None:
    from rich.markup import escape

    if "unavailable" in found.speeds:
        console.print(f"no predictions: {escape(found.speeds['unavailable'])}")
        return
    rows = found.speeds["decode"]
    context = rows[0]["context"]
    console.print(f"predicted output tokens a second on {found.card.name}, {context:,} tokens of context each")
    most = max(row["tokens_per_s"] for row in rows)
    for row in rows:
        cells = max(1, round(40 * row["tokens_per_s"] / most))
        users = f"{row['users']:,} user{'s' if row['users'] > 1 else ''}"
        rate = f"{row['tokens_per_s']:,.0f}"
        console.print(f"{users:>10} [green]{'█' * cells}[/] {rate} ({row['per_user']:,.1f} each)")
    for row in found.speeds["ttft"]:
        console.print(f"predicted first token of a prompt of {row['prompt']:,} tokens: {row['ms']:,.0f} ms")

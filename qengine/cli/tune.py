"""`qengine tune`: measure the launches of the INT4 kernels on this card and keep the best for later runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from qengine.kernels.launch import Launch
    from qengine.kernels.w4a16.tuning import Shape, Timer, TuningCard
    from qengine.models import ModelSpec
    from qengine.quant import WeightSource

BATCHES = "1,16,32,64,128,256,512,1024,2048"


def tune(
    target: Annotated[str, typer.Argument(help="A model folder, or shapes as NxK,NxK (out_features x in_features).")],
    batches: Annotated[str, typer.Option(help="Rows of x to tune for, by commas.")] = BATCHES,
    group_size: Annotated[int, typer.Option(help="Group size for shapes; a model's own is read from it.")] = 128,
    bits: Annotated[int, typer.Option(help="4 or 8, for shapes; a model's own is read from it.")] = 4,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Table to write (default: the user's cache folder, where later runs look)."),
    ] = None,
) -> None:
    """Measure the launches of the INT4 kernels on this GPU and write a table that later runs read.

    A model is tuned for the products it makes: q, k and v in one, gate and up in one. Results so far are kept when it
    is interrupted. Examples: `qengine tune ./Qwen2.5-7B-Instruct-AWQ`, `qengine tune 4096x4096 --batches 1,16`.
    """
    from rich.console import Console

    from qengine.kernels.launch import user_table

    rows = _rows(batches)
    shapes = model_shapes(target) if Path(target).is_dir() else named_shapes(target, bits, group_size)
    card, timer = _card()
    path = out or user_table(card.sm, card.count)
    console = Console(stderr=True, highlight=False)
    console.print(f"{card.name}: {len(shapes)} shapes, {len(rows)} batches each; table {path}")
    before, after = measure(shapes, rows, card, timer, path, console)
    console.print(f"wrote {path}: {before:.0f} us before, {after:.0f} us after, all products together")


def _card() -> tuple[TuningCard, Timer]:
    """The card that is tuned and what times on it."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("tune: no CUDA device was found; tuning measures on the GPU that will serve")
    from qengine.kernels.w4a16.tuning import CardTimer, this_card

    return this_card(), CardTimer()


def measure(
    shapes: list[Shape], batches: list[int], card: TuningCard, timer: Timer, path: Path, console: Console
) -> tuple[float, float]:
    """Tune each shape for each batch, with a bar and a line for each; microseconds of all, as picked and at best."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from qengine.kernels.w4a16.tuning import pick_for, tune_rows

    before = after = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        overall = bars.add_task("all", total=len(shapes) * len(batches))
        current = bars.add_task("")
        for shape in shapes:
            name = f"{shape.n}x{shape.k}"
            bars.update(current, description=f"{name} weights", completed=0, total=None)
            timer.prepare(shape)
            for m in batches:
                bars.update(current, description=f"{name} M={m}", completed=0)
                timed = tune_rows(
                    m, shape, card, timer, lambda done, total: bars.update(current, completed=done, total=total)
                )
                now, launch = timed[0]
                old = next(us for us, tried in timed if tried == pick_for(m, shape, card))
                before, after = before + old, after + now
                console.print(f"{name:>12} M={m:<5} {now:9.1f} us, was {old:9.1f}  {_words(launch)}")
                write_row(path, card, shape, m, now, launch)
                bars.advance(overall)
    return before, after


def _words(launch: Launch) -> str:
    if launch.kernel != "gemm":
        return launch.kernel
    split = f", split {launch.split}" if launch.split > 1 else ""
    return f"{launch.bm}x{launch.bn}, {launch.warps} warps{split}"


def write_row(path: Path, card: TuningCard, shape: Shape, m: int, us: float, launch: Launch) -> None:
    """Put one measurement into the table, in place of an older one of the same product; later picks see it."""
    import json
    from dataclasses import asdict

    from qengine.kernels.launch import bucket, forget_tables

    table: dict[str, Any] = {"sm": card.sm, "count": card.count, "device": card.name, "rows": []}
    if path.is_file():
        try:
            found = json.loads(path.read_text())
            rows = {(r["m"], r["n"], r["k"], r["bits"], r["group"]): r for r in found["rows"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"tune: {path} is not a launch table ({error}); move it away") from error
        if (found.get("sm"), found.get("count")) != (card.sm, card.count):
            raise ConfigError(
                f"tune: {path} is of a card with sm={found.get('sm')} and {found.get('count')} multiprocessors, this "
                f"one has sm={card.sm} and {card.count}; give another file with --out"
            )
    else:
        rows = {}
    row = {"m": bucket(m), "n": shape.n, "k": shape.k, "bits": shape.bits, "group": shape.group, "us": round(us, 2)}
    rows[(row["m"], row["n"], row["k"], row["bits"], row["group"])] = {**row, "launch": asdict(launch)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # whole or not at all: a run that starts meanwhile must not read half a table
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**table, "rows": list(rows.values())}, indent=1) + "\n")
    partial.replace(path)
    forget_tables()


def _rows(batches: str) -> list[int]:
    parts = [part.strip() for part in batches.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"tune: --batches {batches!r} must be whole numbers of at least 1, by commas")
    return [int(part) for part in parts]


def named_shapes(target: str, bits: int, group_size: int) -> list[Shape]:
    """Shapes written as NxK,NxK."""
    if bits not in (4, 8):
        raise ConfigError(f"tune: --bits {bits}; weights are packed in 4 or 8")
    found = []
    for part in target.split(","):
        sizes = part.strip().lower().split("x")
        if len(sizes) != 2 or not all(s.isdigit() and int(s) % 8 == 0 and int(s) for s in sizes):
            raise ConfigError(f"tune: {part!r} is neither a model folder nor a shape; write NxK, multiples of 8")
        found.append(_shape(int(sizes[0]), int(sizes[1]), bits, group_size))
    return list(dict.fromkeys(found))


def model_shapes(folder: str) -> list[Shape]:
    """The distinct packed products that a model makes, as its loader joins them; read from headers."""
    from qengine.checkpoint import open_checkpoint
    from qengine.models import model_spec
    from qengine.quant import open_weights

    checkpoint = open_checkpoint(folder)
    source, spec = open_weights(checkpoint), model_spec(checkpoint)
    found: dict[Shape, None] = {}
    for index in range(spec.num_layers):
        start = f"{spec.prefix}layers.{index}."
        for names in _joined(spec):
            found |= dict.fromkeys(_products(source, [start + name for name in names]))
    if source.has_linear(spec.head_name):
        found |= dict.fromkeys(_products(source, [spec.head_name]))
    if not found:
        raise ConfigError(f"tune: {folder} has no quantized layers; give an INT4 or INT8 model, or shapes")
    return list(found)


def _joined(spec: ModelSpec) -> list[list[str]]:
    """Names of a layer's linears, those that read the same input together."""
    names = list(spec.linear_shapes())
    inputs = ("self_attn.q", "self_attn.k", "self_attn.v")
    qkv = [n for n in names if n.startswith(inputs)]
    gates = [n for n in names if n.startswith(("mlp.gate", "mlp.up"))]
    return [qkv, gates, *([n] for n in names if n not in qkv + gates)]


def _products(source: WeightSource, names: list[str]) -> Iterable[Shape]:
    specs = [source.linear_spec(name) for name in names]
    sizes = [source.linear_shape(name) for name in names]
    packed = {(s.bits, s.group_size) for s in specs if s is not None}
    if len(packed) == 1 and None not in specs:
        bits, group = packed.pop()
        return [_shape(sum(n for n, _ in sizes), sizes[0][1], 4 if bits <= 4 else 8, group)]
    return [
        _shape(n, k, 4 if s.bits <= 4 else 8, s.group_size)
        for s, (n, k) in zip(specs, sizes, strict=True)
        if s is not None
    ]


def _shape(n: int, k: int, bits: int, group_size: int) -> Shape:
    from qengine.kernels.w4a16.layout import servable_group
    from qengine.kernels.w4a16.tuning import Shape

    try:
        return Shape(n, k, bits, servable_group(group_size if 0 < group_size < k else k, k))
    except ValueError as error:
        raise ConfigError(f"tune: {error}") from error

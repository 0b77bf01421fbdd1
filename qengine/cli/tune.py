"""`qengine tune`: measure the launches of the INT4 kernels on this card and keep the best for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

BATCHES = "1,16,32,64,128,256,512,1024,2048"


def tune(
    target: Annotated[str, typer.Argument(help="A model folder, or shapes as NxK,NxK (out_features x in_features).")],
    batches: Annotated[str, typer.Option(help="Rows of x to tune for, by commas.")] = BATCHES,
    group_size: Annotated[int, typer.Option(help="Group size for shapes; a model's own is read from it.")] = 128,
    bits: Annotated[int, typer.Option(help="4 or 8, for shapes; a model's own is read from it.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Table to write; the user's cache folder if not given.")] = None,
) -> None:
    """Measure the launches of the INT4 kernels on this GPU and write a table that later runs read.

    Examples: `qengine tune ./Qwen2.5-7B-Instruct-AWQ`, `qengine tune 4096x4096,22016x4096 --batches 1,16`.
    """
    import json
    from dataclasses import asdict

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from qengine.errors import ConfigError
    from qengine.kernels.launch import bucket, load_table, user_table
    from qengine.kernels.w4a16.ops import _device
    from qengine.kernels.w4a16.tuning import tune_shape

    if not torch.cuda.is_available():
        raise ConfigError("tune: no CUDA device was found; tuning measures on the GPU that will serve")
    sm, smem, count = _device(torch.cuda.current_device())
    shapes = _shapes(target, bits, group_size)
    rows_of_x = [int(m) for m in batches.split(",")]
    path = out or user_table() / f"sm{sm}.json"
    table: dict[str, Any] = {"sm": sm, "device": torch.cuda.get_device_name(), "rows": []}
    if path.is_file():
        table = json.loads(path.read_text())
    kept = {(r["m"], r["n"], r["k"], r["bits"], r["group"]): r for r in table.get("rows", [])}
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("tuning", total=len(shapes))
        for n, k, b, g in shapes:
            for m, timed in tune_shape(n, k, rows_of_x, b, g, sm, smem, count, torch.float16):
                us, launch = timed[0]
                row = {"m": bucket(m), "n": n, "k": k, "bits": b, "group": g, "us": round(us, 2)}
                kept[(row["m"], n, k, b, g)] = {**row, "launch": asdict(launch)}
                console.print(f"{n}x{k} M={m}: {us:.1f} us ({launch.kernel} {launch.bm}x{launch.bn})", highlight=False)
            progress.advance(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**table, "rows": list(kept.values())}, indent=1) + "\n")
    load_table.cache_clear()
    console.print(f"wrote {path}", highlight=False)


def _shapes(target: str, bits: int, group_size: int) -> list[tuple[int, int, int, int]]:
    """(N, K, packed bits, kernel's group size) of every distinct quantized layer."""
    from qengine.errors import ConfigError

    if Path(target).is_dir():
        return _model_shapes(target)
    found = []
    for part in target.split(","):
        sizes = part.lower().split("x")
        if len(sizes) != 2 or not all(s.isdigit() and int(s) % 8 == 0 and int(s) for s in sizes):
            raise ConfigError(f"tune: {part!r} is neither a model folder nor a shape; write NxK, multiples of 8")
        n, k = int(sizes[0]), int(sizes[1])
        found.append((n, k, *_packed(bits, group_size, k)))
    return found


def _model_shapes(folder: str) -> list[tuple[int, int, int, int]]:
    from qengine.checkpoint import open_checkpoint
    from qengine.errors import ConfigError
    from qengine.quant import open_weights
    from qengine.quant.weights import PlainWeight

    source = open_weights(open_checkpoint(folder))
    found: dict[tuple[int, int, int, int], None] = {}
    for name in source.names():
        spec = source.linear_spec(name) if source.has_linear(name) else None
        # one layer of each name says it all: layers repeat
        if spec is not None and (".layers." not in name or ".layers.0." in name):
            weight = source.linear(name)
            n, k = (weight.weight if isinstance(weight, PlainWeight) else weight.q).shape
            key = (n, k, *_packed(spec.bits, spec.group_size, k))
            found[key] = None
    if not found:
        raise ConfigError(f"tune: {folder} has no quantized layers; give an INT4 or INT8 model, or shapes")
    return list(found)


def _packed(bits: int, group_size: int, k: int) -> tuple[int, int]:
    from qengine.kernels.w4a16.layout import servable_group

    try:
        return 4 if bits <= 4 else 8, servable_group(group_size if 0 < group_size < k else k, k)
    except ValueError as error:
        from qengine.errors import ConfigError

        raise ConfigError(f"tune: {error}") from error

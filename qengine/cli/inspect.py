"""`qengine inspect`: what a checkpoint is, layer by layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qengine.errors import QEngineError

if TYPE_CHECKING:
    from qengine.quant import WeightSource


def inspect(
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face hub id of a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option(help="Open *.bin pickle files if there is no safetensors file.")
    ] = False,
) -> None:
    """Say what a checkpoint is: architecture, format, every layer's width, group and size, and whether it can be
    served.

    Equal layers share a row, with * for the layer number. Nothing is loaded: only headers are read.

    Examples:

      qengine inspect ./Llama-3.1-8B-AWQ

      qengine inspect TheBloke/Mistral-7B-v0.1-GPTQ --json | jq .totals
    """
    import json

    from qengine.checkpoint import open_checkpoint
    from qengine.quant import open_weights
    from qengine.quant.summary import summarize

    source = open_weights(open_checkpoint(model, revision=revision, allow_pickle=allow_pickle))
    summary = summarize(source)
    if summary["servable"]:
        summary["reason"] = _model_refusal(source)
        summary["servable"] = summary["reason"] is None
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print(summary)


def _model_refusal(source: WeightSource) -> str | None:
    """Why the weights, which can be read, make no model that can be served; None if they do."""
    from qengine.models import model_spec
    from qengine.models.loading import check_weights

    try:
        check_weights(source, model_spec(source.checkpoint))
    except QEngineError as error:
        return str(error)
    return None


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    layout = summary["format"] if isinstance(summary["format"], str) else ", ".join(summary["format"] or [])
    console.print(f"[bold]{escape(summary['path'])}[/]")
    kind = f"{summary['method']} ({layout})" if summary["method"] else "not quantized"
    console.print(escape(f"{summary['architecture']} · {kind} · {summary['dtype']}"))
    if summary["writer"]:
        console.print(f"written by {escape(summary['writer'])}")
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", no_wrap=True)
    for title in ("n", "out x in", "bits", "group", "sym", "act-order", "format", "MB"):
        table.add_column(title, justify="right")
    for row in _rows(summary):
        table.add_row(*[escape(cell) for cell in row])
    console.print(table)
    console.print(_totals_line(summary))
    if summary["reason"]:
        console.print(f"[bold red]cannot be served:[/] {escape(summary['reason'])}")


def _rows(summary: dict[str, Any]) -> list[list[str]]:
    """Equal layers together; the small tensors in one last row."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for layer in summary["layers"]:
        name = re.sub(r"\.\d+\.", ".*.", layer["name"])
        keys = ("bits", "group_size", "sym", "act_order", "format")
        shape = "?" if layer["shape"] is None else f"{layer['shape'][0]} x {layer['shape'][1]}"
        groups.setdefault((name, shape, *(layer[key] for key in keys)), []).append(layer["bytes"])
    rows = []
    for (name, shape, bits, group, sym, order, layout), sizes in groups.items():
        flags = ["" if flag is None else "yes" if flag else "no" for flag in (sym, order)]
        texts = ["" if value is None else str(value) for value in (bits, group)]
        rows.append([name, str(len(sizes)), shape, *texts, *flags, layout or "?", f"{sum(sizes) / 1e6:.2f}"])
    if summary["tensors"]:
        size = sum(tensor["bytes"] for tensor in summary["tensors"])
        rows.append(["(norms and other tensors)", str(len(summary["tensors"])), *[""] * 6, f"{size / 1e6:.2f}"])
    return rows


def _totals_line(summary: dict[str, Any]) -> str:
    totals = summary["totals"]
    parts = [f"{totals['quantized_layers']} of {totals['layers']} matrices quantized"]
    if totals["parameters"]:
        parts.append(f"{totals['parameters'] / 1e6:,.1f} M parameters")
        parts.append(f"{totals['bits_per_weight']:.2f} bits a weight over all")
    if totals["quantized_bits_per_weight"]:
        parts.append(f"{totals['quantized_bits_per_weight']:.2f} in the quantized ones")
    parts.append(f"{totals['disk_bytes'] / 1e6:,.1f} MB on disk in {len(summary['files'])} file(s)")
    return " · ".join(parts)

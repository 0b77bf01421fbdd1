"""`qengine dequantize`: a plain checkpoint out of a quantized one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dequantize(
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face hub id of a quantized checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist, or be empty.")],
    dtype: Annotated[str, typer.Option(help="float32 (every value exactly), float16 or bfloat16.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option(help="Open *.bin pickle files if there is no safetensors file.")
    ] = False,
) -> None:
    """Write a plain checkpoint with the weights that a quantized one stands for, under Hugging Face's names.

    One layer is in memory at a time. The folder appears whole or not at all. transformers loads the result without any
    quantization library; its tokenizer, chat template and generation config come along.

    Examples:

      qengine dequantize ./Llama-3.1-8B-AWQ --out ./Llama-3.1-8B-plain --dtype float16

      qengine dequantize TheBloke/Mistral-7B-v0.1-GPTQ --out ./mistral --dtype bfloat16
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from qengine.checkpoint import open_checkpoint
    from qengine.quant.export import dequantize_checkpoint

    checkpoint = open_checkpoint(model, revision=revision, allow_pickle=allow_pickle)
    console = Console(stderr=True)
    columns = (
        TextColumn("dequantizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        dequantize_checkpoint(
            checkpoint,
            out,
            dtype=dtype,
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    size = sum(file.stat().st_size for file in out.expanduser().iterdir())
    typer.echo(f"{out}: {size / 1e6:,.1f} MB, {dtype}")

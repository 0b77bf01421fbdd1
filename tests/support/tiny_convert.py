"""Tiny models whose linears every packing can hold, and their conversion with few and short calibration windows."""

from __future__ import annotations

from tiny_llm import tiny_folder
from tiny_models import FAMILIES

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
CONVERTED = [name for name in FAMILIES if name not in ("llama1", "qwen2-sliding")]


def convertible(family="llama3", **overrides):
    """(transformers' model, folder) with widths that are multiples of 32."""
    return tiny_folder(family, **{**SHAPE, **overrides})


def quick_convert(folder, out, text, **options):
    """convert_checkpoint with defaults for tiny models."""
    from qengine.convert.run import convert_checkpoint

    return convert_checkpoint(
        folder, out, calibration=text, **{"samples": 4, "seq_len": 48, "group_size": 32, **options}
    )


class Stop(Exception):
    """Not a QEngineError: a defect or an interrupt, which keeps the work done."""


def stop_after(layers):
    """A progress function that raises Stop when so many layers are done."""

    def progress(done, total):
        if done == layers:
            raise Stop

    return progress


def contents(folder):
    """File name -> bytes."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}

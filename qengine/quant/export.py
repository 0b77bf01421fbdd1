"""A plain checkpoint out of any that can be read: every weight dequantized, Hugging Face names, nothing else
changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import Checkpoint
from qengine.checkpoint.writer import SHARD_BYTES, Entry, new_folder, refuse_source_as_target, write_json, write_shards
from qengine.errors import CheckpointError, ConfigError
from qengine.quant.reader import short
from qengine.quant.source import WeightSource, open_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KEPT_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str = "float32",
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the checkpoint's plain form to folder `out`, one tensor in memory at a time.

    dtype: float32 (every value kept exactly), float16 or bfloat16. The folder appears whole or not at all; an existing
    one that is not empty is replaced only with `force`. progress(done, total) counts tensors. Raises ConfigError for a
    bad option, CheckpointError and UnsupportedError for a checkpoint that cannot be read, before anything is written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use {', '.join(DTYPES)}")
    refuse_source_as_target(out, checkpoint.path)
    source = open_weights(checkpoint)
    source.check()
    entries = plain_entries(source, DTYPES[dtype])
    done = 0

    def count(_: str) -> None:
        nonlocal done
        done += 1
        checkpoint.tensors.close()  # mapped pages that were read count as memory until they are unmapped
        if progress:
            progress(done, len(entries))

    with new_folder(out, force=force) as folder:
        write_json(folder / "config.json", plain_config(source, dtype))
        copy_side_files(checkpoint.path, folder)
        write_shards(
            folder, entries, lambda name: _load(source, name, DTYPES[dtype]), limit=shard_bytes, on_tensor=count
        )


def plain_entries(source: WeightSource, dtype: torch.dtype) -> list[Entry]:
    """What the plain checkpoint holds, from headers: module weights first to last, then the other tensors."""
    infos = source.checkpoint.tensors
    entries = [Entry(f"{name}.weight", dtype, source.linear_shape(name)) for name in source.quantized_modules()]
    for name in source.plain_tensors():
        stored = infos[name]
        entries.append(Entry(name, dtype if stored.dtype.is_floating_point else stored.dtype, stored.shape))
    tied = source.tied_embeddings()
    heads = {f"{head}.weight": f"{embedding}.weight" for embedding, head in tied.items()}
    return [Entry(heads.get(entry.name, entry.name), entry.dtype, entry.shape) for entry in entries]


def _load(source: WeightSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = source.tensor(name)
    if not tensor.dtype.is_floating_point:
        return tensor
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name}: holds values up to {float(tensor.abs().max()):.4g}, beyond {short(dtype)}; use --dtype "
            "bfloat16 or float32"
        )
    return cast


def plain_config(source: WeightSource, dtype: str) -> dict[str, Any]:
    """config.json without quantization, its dtype fields set, heads untied where the file holds a head of its own."""
    config = _without_quantization(source.checkpoint.config, dtype)
    config["dtype"] = dtype
    text = config.get("text_config")
    if isinstance(text, dict):
        config["text_config"] = text = _without_quantization(text, dtype)
    own_head = any(name.endswith("lm_head") for name in source.quantized_modules()) and not source.tied_embeddings()
    for holder in (config, text):
        if own_head and isinstance(holder, dict) and holder.get("tie_word_embeddings"):
            holder["tie_word_embeddings"] = False
    return config


def _without_quantization(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    return {k: dtype if k in ("dtype", "torch_dtype") else v for k, v in kept.items()}


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, generation config, chat template, custom code and licence files."""
    for pattern in _KEPT_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)

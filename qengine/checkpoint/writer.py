"""Write safetensors shards one tensor at a time, and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from qengine.checkpoint.safetensors_file import DTYPES
from qengine.errors import CheckpointError, ConfigError

SHARD_BYTES = 4_000_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, dtype and shape, known before its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * self.dtype.itemsize


def split_shards(entries: Sequence[Entry], limit: int = SHARD_BYTES) -> list[list[Entry]]:
    """Entries in order, cut so that no shard exceeds `limit` bytes (a larger tensor is a shard of its own)."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def write_shards(
    folder: Path,
    entries: Sequence[Entry],
    load: Callable[[str], torch.Tensor],
    *,
    limit: int = SHARD_BYTES,
    on_tensor: Callable[[str], None] | None = None,
) -> None:
    """Write model.safetensors, or shards and their index. One tensor is in memory at a time: `load(name)` gives it."""
    shards = split_shards(entries, limit)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / name, shard, load, on_tensor)
        weight_map.update({entry.name: name for entry in shard})
    if len(shards) > 1:
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_shard(
    path: Path,
    entries: Sequence[Entry],
    load: Callable[[str], torch.Tensor],
    on_tensor: Callable[[str], None] | None = None,
) -> None:
    """Write one safetensors file, its tensors in the order of `entries`, one in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        span = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        position += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for entry in entries:
            tensor = load(entry.name)
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise AssertionError(f"{entry.name}: announced {entry}, got {tensor.dtype} {list(tensor.shape)}")
            if tensor.numel() == 1:
                tensor = tensor.clone(memory_format=torch.contiguous_format)  # a single value may have any stride
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            if on_tensor:
                on_tensor(entry.name)


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_source_as_target(out: Path, source: Path) -> None:
    """Raise ConfigError if writing folder `out` would replace `source`, the checkpoint read, or a folder around it."""
    target, origin = out.expanduser().resolve(), source.resolve()
    if target == origin or target in origin.parents:
        what = "is" if target == origin else "contains"
        raise ConfigError(f"{out}: {what} the checkpoint itself; write to another folder")


@contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A hidden folder beside `out` to write into; it becomes `out` when the block ends well, and goes when it does not.

    ConfigError if `out` exists and is not empty, unless `force`, which replaces it at the end. OSErrors inside the
    block
    (a full disk) become a CheckpointError.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not force:
        raise ConfigError(
            f"{out}: exists already and is not an empty folder; choose another, or replace it with --force"
        )
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _put_in_place(partial, out)
    except OSError as error:
        raise CheckpointError(
            f"{out}: could not be written ({error.strerror or error}); free space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.replaced-{os.getpid()}"
    if out.exists():
        out.rename(old)
    partial.rename(out)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)

"""The header of one safetensors file, read and checked in full before a single tensor byte is touched.

Format (https://huggingface.co/docs/safetensors): u64 little-endian header length, JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, then one byte buffer that the
tensors tile without gap or overlap. The library's own reader reports a damaged file without naming it or the tensor,
which is why the header is parsed here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
AGAIN = "download or copy it again"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

_OTHER_KINDS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself: run `git lfs pull` in the folder"),
    (b"<!doctype", "an HTML page (a failed download): download it again, logged in if the model is gated"),
    (b"<html", "an HTML page (a failed download): download it again, logged in if the model is gated"),
    (b"<?xml", "an XML page (a failed download): download it again"),
    (b"pk\x03\x04", "a PyTorch pickle or zip archive: convert it with `safetensors` or open it with allow_pickle"),
    (b"\x80\x02", "a Python pickle: convert it to safetensors with a tool that you trust"),
    (b"gguf", "a GGUF file: use the original Hugging Face checkpoint"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: dtype, shape, the file that holds it, its size, and its first byte from the file's
    start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int = 0


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors of the file and its metadata. CheckpointError names the file, the tensor and what is wrong."""
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            head = file.read(64)
            length = _header_length(path, size, head)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check that it exists") from error
    header = _parse(path, raw)
    metadata = _metadata(path, header.pop("__metadata__", None))
    start = 8 + length
    tensors = {name: _entry(path, name, entry, start, size) for name, entry in header.items()}
    _check_tiling(path, tensors, start, size)
    return tensors, metadata


def _header_length(path: Path, size: int, head: bytes) -> int:
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty (0 bytes); {AGAIN}")
    length = int(struct.unpack("<Q", head[:8])[0]) if size >= 8 else 0
    # Any two bytes may begin a header's length (640 looks like a pickle's mark): an object after it settles the matter.
    if not (length <= MAX_HEADER_BYTES and head[8:9] == b"{"):
        lowered = head.lower().lstrip()
        for magic, what in _OTHER_KINDS:
            if lowered.startswith(magic):
                raise CheckpointError(f"{path}: not a safetensors file but {what}")
    if size < 8:
        raise CheckpointError(f"{path}: truncated: {size} bytes, a safetensors header takes at least 8; {AGAIN}")
    if length < 2:
        raise CheckpointError(f"{path}: not a safetensors file: its header is {length} bytes long; {AGAIN}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: not a safetensors file: it claims a header of {length} bytes (at most {MAX_HEADER_BYTES}); "
            f"{AGAIN}"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: truncated inside the header: {8 + length} bytes expected, the file has {size}; {AGAIN}"
        )
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} occurs twice")
        result[key] = value
    return result


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is damaged: not valid JSON ({error}); {AGAIN}"
        ) from error
    if not isinstance(header, dict):
        kind = type(header).__name__
        raise CheckpointError(f"{path}: the safetensors header is a JSON {kind}, expected an object; {AGAIN}")
    return header


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings; {AGAIN}")
    return metadata


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where}: its header entry lacks dtype, shape or data_offsets; {AGAIN}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: unknown dtype {entry['dtype']!r}; known: {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_is_size, shape)):
        raise CheckpointError(f"{where}: its shape {shape!r} is not a list of sizes; {AGAIN}")
    if math.prod(max(dim, 1) for dim in shape) >= 2**62:
        raise CheckpointError(f"{where}: its shape {shape!r} is larger than any memory; {AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} must be two byte positions; {AGAIN}")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if begin > end:
        raise CheckpointError(f"{where}: its data ends ({end}) before it begins ({begin}); {AGAIN}")
    if end - begin != nbytes:
        raise CheckpointError(
            f"{where}: shape {shape} of {entry['dtype']} takes {nbytes} bytes, its data_offsets span "
            f"{end - begin}; {AGAIN}"
        )
    if start + end > size:
        raise CheckpointError(
            f"{where}: its data lie outside the file: they end at byte {start + end}, the file has {size} bytes "
            f"(truncated?); {AGAIN}"
        )
    return TensorInfo(dtype, tuple(shape), path, nbytes, start + begin)


def _check_tiling(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    position, before = start, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < position:
            raise CheckpointError(f"{path}: tensors {before!r} and {name!r} overlap in the file; {AGAIN}")
        if info.offset > position:
            raise CheckpointError(
                f"{path}: {info.offset - position} bytes before tensor {name!r} belong to none; {AGAIN}"
            )
        position, before = info.offset + info.nbytes, name
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to none; {AGAIN}")

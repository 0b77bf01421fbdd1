"""Which files of a folder are the model's weights, and the JSON files beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from qengine.errors import CheckpointError

_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)$")
_NOT_MODEL = ("adapter_model", "consolidated", "dequant_fp32", "logits", "optimizer", "training_args", "scheduler")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; CheckpointError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download or write it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object {{...}}")
    return value


def read_index(path: Path) -> dict[str, str]:
    """weight_map of an index file, tensor name to file name; names that leave the folder are refused."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: has no weight_map; download it again or delete it to use the shards as they are"
        )
    for tensor, name in weight_map.items():
        inside = isinstance(name, str) and name and "\\" not in name and "\0" not in name
        if not inside or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is placed in {name!r}, which is not a file of this folder"
            )
    return weight_map


def weight_files(folder: Path, suffix: str) -> tuple[list[Path], dict[str, str] | None]:
    """The model's files ending in `suffix` (".safetensors" or ".bin") and the index if there is one.

    Order, as transformers': the single file, the index, then shards without an index, then whatever is left.
    """
    single = folder / ("model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin")
    for index_path in sorted(folder.glob(f"*{suffix}.index.json")):
        index = read_index(index_path)
        if single.is_file() and single.name not in index.values():
            continue  # a leftover index: transformers prefers the single file too
        files = [folder / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(files)} shards named by {index_path.name} are missing: "
                f"{', '.join(missing[:4])}; download them"
            )
        return files, index
    if single.is_file():
        return [single], None
    names = [f for f in sorted(folder.glob(f"*{suffix}")) if f.is_file() and not f.name.startswith(_NOT_MODEL)]
    return _complete_shards(folder, names), None


def _complete_shards(folder: Path, files: list[Path]) -> list[Path]:
    """Of shards named x-00001-of-00003, all must be there; they come before files that are no shards."""
    series: dict[tuple[str, int], dict[int, Path]] = {}
    for file in files:
        if match := _SHARD.match(file.stem):
            series.setdefault((match["stem"], int(match["total"])), {})[int(match["number"])] = file
    if not series:
        return files
    if len(series) > 1:
        names = ", ".join(sorted(f"{stem}-*-of-{total}" for stem, total in series))
        raise CheckpointError(f"{folder}: holds several sets of shards ({names}) and no index; keep one set")
    ((stem, total), found) = next(iter(series.items()))
    missing = [number for number in range(1, total + 1) if number not in found]
    if missing or len(found) != total:
        raise CheckpointError(f"{folder}: shards {missing[:8]} of {total} ({stem}-*-of-*) are missing; download them")
    return [found[number] for number in sorted(found)]

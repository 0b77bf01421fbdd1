"""A Hugging Face checkpoint folder: its config as plain data and its tensors by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qengine.checkpoint.files import read_json_object, weight_files
from qengine.checkpoint.hub import resolve_folder
from qengine.checkpoint.pickle_files import load_pickles
from qengine.checkpoint.tensors import TensorStore
from qengine.errors import CheckpointError


class Checkpoint:
    """An opened folder. path: the folder. config: config.json as it is on disk. tensors: a TensorStore."""

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: TensorStore, generation_config: dict[str, Any]
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self.generation_config = generation_config

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors)"

    def text_config(self) -> dict[str, Any]:
        """The language model's config: config itself, or config["text_config"] merged over it (multimodal wrappers)."""
        text = self.config.get("text_config")
        if not isinstance(text, dict):
            return dict(self.config)
        merged = {key: value for key, value in self.config.items() if key != "text_config"}
        merged.update(text)
        if self.config.get("architectures"):
            merged["architectures"] = self.config["architectures"]
        return merged

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the folder's file `name`; None if there is no such file."""
        path = self.path / name
        return read_json_object(path) if path.is_file() else None

    def disk_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self.tensors.files)


def open_checkpoint(
    model: str | os.PathLike[str], *, revision: str | None = None, allow_pickle: bool = False
) -> Checkpoint:
    """Open a folder or a Hugging Face hub id (fetched into the hub's cache; pickles are not).

    Reads and checks config.json, generation_config.json and every safetensors header; weights stay on disk until used.
    Raises CheckpointError for whatever is missing or damaged. Pickle files (*.bin) are refused unless `allow_pickle`.
    """
    folder = resolve_folder(model, revision, allow_pickle)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{folder}: has no config.json; give the folder of a Hugging Face model")
    config = read_json_object(config_path)
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return Checkpoint(folder, config, _open_tensors(folder, allow_pickle), generation)


def _open_tensors(folder: Path, allow_pickle: bool) -> TensorStore:
    files, index = weight_files(folder, ".safetensors")
    if files:
        store = TensorStore(files, index)
    else:
        store = _open_pickles(folder, allow_pickle)
    if not store:
        raise CheckpointError(f"{folder}: its weight files hold no tensors; download them again")
    return store


def _open_pickles(folder: Path, allow_pickle: bool) -> TensorStore:
    files, _ = weight_files(folder, ".bin")
    files = files or weight_files(folder, ".pt")[0]
    if not files:
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{folder}: holds a LoRA adapter, not a model; merge it into its base model first")
        if any(folder.glob("*.gguf")):
            raise CheckpointError(f"{folder}: holds a GGUF file; use the original Hugging Face checkpoint")
        raise CheckpointError(f"{folder}: holds no *.safetensors file; download the model's weights")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder}: holds only pickle files ({files[0].name}, ...), which can run code when opened; convert "
            "them to "
            "safetensors, or ask for them by name with allow_pickle (--allow-pickle)"
        )
    return load_pickles(files)

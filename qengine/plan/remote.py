"""A model on the Hugging Face hub by its headers alone: kilobytes are fetched, to plan before gigabytes are."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import Checkpoint, TensorInfo, TensorStore, open_checkpoint
from qengine.checkpoint.files import read_json_object
from qengine.checkpoint.safetensors_file import DTYPES
from qengine.errors import CheckpointError

SMALL_FILES = ("generation_config.json", "quantize_config.json", "quant_config.json", "tokenizer_config.json")
MOST_BYTES = 8 << 20
"""Tensors up to this size are fetched where a format's reader looks at them (zero points, column orders)."""


class RemoteStore(TensorStore):
    """Tensors of a hub repository: headers now, small tensors when they are asked for, no others."""

    def __init__(self, repo: str, revision: str | None, files: dict[str, Any]) -> None:
        """files: name of each safetensors file -> its header, as the hub's client parses it."""
        super().__init__([])
        self._repo = repo if revision is None else f"{repo}@{revision}"
        self._starts: dict[str, int] = {}
        for file, header in files.items():
            infos = {}
            for name, tensor in header.tensors.items():
                if tensor.dtype not in DTYPES:
                    raise CheckpointError(f"{repo}/{file}: tensor {name!r} has the unknown dtype {tensor.dtype!r}")
                begin, end = tensor.data_offsets
                infos[name] = TensorInfo(DTYPES[tensor.dtype], tuple(tensor.shape), Path(file), end - begin, begin)
            self._add(infos)

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """As TensorStore.load. Raises CheckpointError for tensors that are too large for a plan to need."""
        info = self.get(name)
        if info is None or info.nbytes == 0:
            return super().load(name, rows)
        if info.nbytes > MOST_BYTES:
            raise CheckpointError(
                f"{self._repo}: {name} ({info.nbytes >> 20} MiB) would have to be fetched for this plan; download the "
                f"model (hf download {self._repo.partition('@')[0]}) and plan its folder"
            )
        start = self._start(info.file.name) + info.offset
        raw = bytearray(self._read(info.file.name, start, start + info.nbytes))
        tensor = torch.frombuffer(raw, dtype=info.dtype).view(info.shape)
        return tensor if rows is None else tensor[rows]

    def _start(self, file: str) -> int:
        """Where the data of a file begin: after the header and its length."""
        if file not in self._starts:
            self._starts[file] = 8 + int.from_bytes(self._read(file, 0, 8), "little")
        return self._starts[file]

    def _read(self, file: str, start: int, end: int) -> bytes:
        from huggingface_hub import HfFileSystem

        with _explained(self._repo):
            data: bytes = HfFileSystem().cat_file(f"{self._repo}/{file}", start=start, end=end)
        return data


def open_headers(model: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint of a folder, or of a hub id by its headers (its files if they are here already).

    Raises CheckpointError.
    """
    path = Path(model).expanduser()
    if path.exists() or "/" not in model or model.startswith((".", "/", "~")):
        return open_checkpoint(model, revision=revision)
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str):
        with contextlib.suppress(CheckpointError):
            return open_checkpoint(str(Path(cached).parent))
    with _explained(model):
        folder = Path(hf_hub_download(model, "config.json", revision=revision)).parent
        for name in SMALL_FILES:
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(model, name, revision=revision)
        headers = HfApi().get_safetensors_metadata(model, revision=revision)
    generation = folder / "generation_config.json"
    return Checkpoint(
        folder,
        read_json_object(folder / "config.json"),
        RemoteStore(model, revision, headers.files_metadata),
        read_json_object(generation) if generation.is_file() else {},
    )


@contextlib.contextmanager
def _explained(model: str) -> Any:
    """Errors of the hub's client and of the network as CheckpointError."""
    try:
        yield
    except Exception as error:
        root = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError) and root not in ("huggingface_hub", "httpx", "requests", "urllib3"):
            raise
        words = str(error).strip().splitlines()
        raise CheckpointError(
            f"{model}: no such folder here, and its headers could not be read from the hub "
            f"({words[0] if words else type(error).__name__}); check the name and the connection, log in if it is "
            "gated, or give the path of a downloaded folder"
        ) from error

"""Named tensors over one or many files, mapped into memory and paged in only when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from qengine.checkpoint.safetensors_file import TensorInfo, read_header
from qengine.errors import CheckpointError


class TensorStore(Mapping[str, TensorInfo]):
    """Every tensor of a checkpoint by name: `store[name]` is its TensorInfo, `store.load(name)` the tensor.

    Headers are read and checked when the store is made; the data stay on disk. Loaded tensors are views of a private
    map (copy on write): writing to one never changes the file.
    """

    def __init__(self, files: list[Path], index: Mapping[str, str] | None = None) -> None:
        """`index` maps tensor names to file names as model.safetensors.index.json does; it must agree with the
        files."""
        self.metadata: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._maps: dict[Path, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._device = torch.device("cpu")
        self.files = list(files)
        for file in self.files:
            infos, metadata = read_header(file)
            self.metadata.update(metadata)
            self._add(infos)
        self._check_index(index or {})

    @classmethod
    def from_loaded(cls, tensors: Mapping[str, torch.Tensor], file_of: Mapping[str, Path]) -> TensorStore:
        """A store over tensors that are in memory already (pickle files)."""
        store = cls([])
        store.files = sorted(set(file_of.values()))
        store._loaded = dict(tensors)
        store._infos = {
            name: TensorInfo(t.dtype, tuple(t.shape), file_of[name], t.numel() * t.element_size())
            for name, t in tensors.items()
        }
        return store

    def _add(self, infos: dict[str, TensorInfo]) -> None:
        for name, info in infos.items():
            if name in self._infos:
                raise CheckpointError(
                    f"tensor {name!r} is in {self._infos[name].file.name} and in {info.file.name}; "
                    "keep one copy (a leftover shard of another save?)"
                )
            self._infos[name] = info

    def _check_index(self, index: Mapping[str, str]) -> None:
        for name, file in index.items():
            found = self._infos.get(name)
            if found is None or found.file.name != Path(file).name:
                where = "in none of the shards" if found is None else f"in {found.file.name}"
                raise CheckpointError(
                    f"the index places tensor {name!r} in {file}, but it is {where}; download the index and the "
                    "shards again"
                )

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._infos.values())

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or its `rows` along dimension 0; a view of the mapped file, or within `placed_on` a copy on that
        device. CheckpointError if absent."""
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name!r} is not in the checkpoint; it has {len(self._infos)} others")
        tensor = self._loaded[name] if name in self._loaded else self._view(info)
        return (tensor if rows is None else tensor[rows]).to(self._device)

    @contextmanager
    def placed_on(self, device: torch.device) -> Iterator[None]:
        """Within it, `load` copies tensors to `device`, and torch makes new tensors there too.

        So a format's unpacking, written for any device, runs where its packed tensors were copied to.
        """
        before, self._device = self._device, device
        try:
            with device:
                yield
        finally:
            self._device = before

    def _view(self, info: TensorInfo) -> torch.Tensor:
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        raw = self._map(info.file)[info.offset : info.offset + info.nbytes]
        if info.offset % info.dtype.itemsize:
            raw = raw.clone()  # a header of odd length leaves the data unaligned: only a copy can be reinterpreted
        return raw.view(info.dtype).view(info.shape)

    def _map(self, file: Path) -> torch.Tensor:
        if file not in self._maps:
            try:
                size = file.stat().st_size
                self._maps[file] = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"{file}: cannot be mapped into memory ({error}); check that it still exists"
                ) from error
        return self._maps[file]

    def close(self) -> None:
        """Drop the maps; tensors handed out before stay valid."""
        self._maps.clear()

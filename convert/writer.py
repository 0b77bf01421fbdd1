"""Writes a checkpoint folder that is either whole or not there.

Everything goes to a hidden sibling of the target, config.json last; then the sibling is renamed. A process killed on
the way leaves only the hidden folder, without config.json, and the next run for the same target removes it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from qengine.errors import CapacityError, ConfigError

SHARD_BYTES = 4_000_000_000
INDEX = "model.safetensors.index.json"


class FolderWriter:
    """Context manager for one new folder. On an error or interrupt it removes what it wrote.

    Raises ConfigError if `target` is a file or a folder with content and `force` is not set, CapacityError if the disk
    is full. Nothing of the target changes before `commit`.
    """

    def __init__(self, target: Path, *, force: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        self.target = Path(os.path.realpath(Path(target).expanduser()))
        self.force = force
        self.shard_bytes = shard_bytes
        self.bytes_written = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[dict[str, int]] = []  # tensor name -> bytes, one dict a file
        self._committed = False

    def __enter__(self) -> FolderWriter:
        """Check the target and make the hidden folder."""
        self._check_target()
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        self.folder = self.target.parent / f".{self.target.name}.partial-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hidden folder unless it became the target."""
        os.close(self._lock)
        if not self._committed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check_target(self) -> None:
        if self.target.is_dir():
            if any(self.target.iterdir()) and not self.force:
                raise ConfigError(
                    f"--out {self.target}: exists and is not empty; choose another folder, or pass --force"
                )
        elif self.target.exists():
            raise ConfigError(f"--out {self.target}: is not a folder; choose another path")

    def _remove_stale(self) -> None:
        for folder in self.target.parent.glob(f".{glob.escape(self.target.name)}.partial-*"):
            lock = folder / ".lock"
            if not lock.exists():
                shutil.rmtree(folder, ignore_errors=True)
                continue
            handle = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:  # the lock goes with its process, so this one is alive
                raise ConfigError(
                    f"--out {self.target}: another conversion is writing it; wait, or choose another"
                ) from error
            finally:
                os.close(handle)
            shutil.rmtree(folder, ignore_errors=True)

    def require_space(self, needed: int) -> None:
        """Raise CapacityError now if the disk has less than `needed` bytes free."""
        free = shutil.disk_usage(self.target.parent).free
        if free < needed:
            raise CapacityError(
                f"--out {self.target}: the disk has {free / 1e9:.2f} GB free and the checkpoint needs about "
                f"{needed / 1e9:.2f} GB; free some space or choose another disk"
            )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor for the current shard; a full shard goes to the disk."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += size

    def add_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        self.add_bytes(name, text.encode("utf-8"))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a file."""
        try:
            with open(self.folder / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._translate(error) from error
        self.bytes_written += len(data)

    def _flush(self) -> None:
        path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
            os.chmod(path, os.stat(self.folder / ".lock").st_mode)  # the library writes files for the owner alone
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise self._translate(error) from error
        self.bytes_written += path.stat().st_size
        self._shards.append({n: t.numel() * t.element_size() for n, t in self._pending.items()})
        self._pending, self._pending_bytes = {}, 0

    def _translate(self, error: Exception) -> Exception:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error) or "os error 28" in str(error):
            return CapacityError(
                f"--out {self.target}: the disk is full after {self.bytes_written / 1e9:.2f} GB; what was written is "
                "removed. Free some space or choose another disk"
            )
        return error

    def commit(self, config: dict[str, Any]) -> None:
        """Finish the shards, write config.json last, and put the folder in its place."""
        if self._pending:
            self._flush()
        self._name_shards()
        self.add_json("config.json", config)
        os.unlink(self.folder / ".lock")
        _fsync_folder(self.folder)
        old = None
        if self.target.is_dir() and any(self.target.iterdir()):
            old = self.target.parent / f".{self.target.name}.old-{os.getpid()}"
            os.rename(self.target, old)
        os.rename(self.folder, self.target)
        self._committed = True
        _fsync_folder(self.target.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _name_shards(self) -> None:
        total = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, sizes in enumerate(self._shards):
            name = "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            os.rename(self.folder / f"shard-{number:05d}.safetensors", self.folder / name)
            weight_map.update(dict.fromkeys(sizes, name))
        if total > 1:
            size = sum(sum(sizes.values()) for sizes in self._shards)
            self.add_json(INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

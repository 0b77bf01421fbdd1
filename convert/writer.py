"""Writes a checkpoint folder that is either whole or not there, in parts that outlive a killed process.

Everything goes to a hidden sibling of the target. Each decoder layer is a file of its own there, and `state.json` says
how many are finished: both appear by a rename, so a process killed at any moment leaves whole parts only. `commit`
joins the parts to shards, writes config.json last, and renames the sibling.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qengine.checkpoint import TensorStore
from qengine.checkpoint.writer import SHARD_BYTES, Entry, split_shards, write_shard
from qengine.convert.workfolder import FolderLock, fsync_folder, restore_replaced
from qengine.errors import CapacityError, ConfigError, QEngineError

INDEX = "model.safetensors.index.json"
STATE = "state.json"


class FolderWriter:
    """Context manager for one new folder.

    fingerprint: whatever the bytes of the result depend on; `resume` continues what an earlier process with the same
    one left. `finished` parts are there then, and `saved` is what the last `finish_part` kept. An error that a user can
    act on (QEngineError) removes the hidden folder; an interrupt, a kill or a crash leaves its finished parts.

    Raises ConfigError if `target` is a file, or a folder with content and `force` is not set, or if `resume` finds an
    unfinished conversion with another fingerprint; CapacityError if the disk is full. Nothing of the target changes
    before `commit`.
    """

    def __init__(
        self,
        target: Path,
        *,
        force: bool = False,
        shard_bytes: int = SHARD_BYTES,
        resume: bool = False,
        fingerprint: dict[str, Any] | None = None,
    ) -> None:
        self.target = Path(os.path.realpath(Path(target).expanduser()))
        self.folder = self.target.parent / f".{self.target.name}.partial"
        self.force = force
        self.shard_bytes = shard_bytes
        self.resume = resume
        self.fingerprint = json.loads(json.dumps(fingerprint or {}))
        self.finished = 0
        self.saved: dict[str, Any] = {}
        self._layout: list[list[tuple[str, str, list[int], int]]] | None = None
        self._shards_done = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._committed = False

    def __enter__(self) -> FolderWriter:
        """Check the target, and make the hidden folder or take up the one that is there."""
        restore_replaced(self.target)
        self._check_target()
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder, self.target)
        if not (self.resume and self._take_up()):
            self._lock.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hidden folder unless it became the target, or has something to resume."""
        self._lock.release()
        keep = error is not None and not isinstance(error, QEngineError) and self.finished > 1
        if not self._committed and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check_target(self) -> None:
        if self.target.is_dir():
            if any(self.target.iterdir()) and not self.force:
                raise ConfigError(
                    f"--out {self.target}: exists and is not empty; choose another folder, or pass --force"
                )
        elif self.target.exists():
            raise ConfigError(f"--out {self.target}: is not a folder; choose another path")

    def _take_up(self) -> bool:
        """Read the state an earlier process left. False if there is nothing to go on with."""
        path = self.folder / STATE
        if not path.is_file():
            return False
        state = json.loads(path.read_text(encoding="utf-8"))
        before = state["fingerprint"]
        if before != self.fingerprint:
            keys = sorted(k for k in {*before, *self.fingerprint} if before.get(k) != self.fingerprint.get(k))
            changes = "; ".join(f"{k} was {before.get(k)!r}, is {self.fingerprint.get(k)!r}" for k in keys)
            self._lock.release()
            raise ConfigError(
                f"--resume: the unfinished conversion at {self.folder} was started differently ({changes}); repeat its "
                "command, or drop --resume to start over"
            )
        self.finished, self.saved = state["finished"], state["saved"]
        self._layout, self._shards_done = state["layout"], state["shards_done"]
        return True

    def require_space(self, needed: int) -> None:
        """Raise CapacityError now if the disk has less than `needed` bytes free, those already written aside."""
        written = sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        free = shutil.disk_usage(self.target.parent).free
        if free + written < needed:
            raise CapacityError(
                f"--out {self.target}: the disk has {free / 1e9:.2f} GB free and the conversion needs about "
                f"{(needed - written) / 1e9:.2f} GB; free some space or choose another disk"
            )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor for the current part."""
        self._pending[name] = tensor.detach().cpu().contiguous()

    def take_queued(self) -> dict[str, torch.Tensor]:
        """The tensors that are queued, which are no longer; for `finish_part` in another thread."""
        taken, self._pending = self._pending, {}
        return taken

    def finish_part(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Put `tensors`, or those queued, on the disk as the next part, and `saved` beside them; then both count."""
        tensors = self.take_queued() if tensors is None else tensors
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self._write_tensors(self._part(self.finished), entries, tensors)
        self.finished += 1
        self.saved = saved
        self._write_state()

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def _write_tensors(self, path: Path, entries: list[Entry], tensors: Any) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            write_shard(temporary, entries, tensors.__getitem__)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except OSError as error:
            raise self.translate(error) from error

    def _write_state(self) -> None:
        state = {
            "fingerprint": self.fingerprint,
            "finished": self.finished,
            "layout": self._layout,
            "shards_done": self._shards_done,
            "saved": self.saved,
        }
        self.add_bytes(STATE, json.dumps(state).encode())

    def add_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        self.add_bytes(name, text.encode("utf-8"))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a file; it appears whole."""
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self.folder / name)
        except OSError as error:
            raise self.translate(error) from error

    def translate(self, error: OSError) -> Exception:
        """CapacityError for a full disk, else the error itself."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CapacityError(
                f"--out {self.target}: the disk is full; what was written is removed. Free some space or choose "
                "another disk"
            )
        return error

    def commit(self, config: dict[str, Any]) -> None:
        """Join the parts to shards if `join` has not, write config.json last, and put the folder in its place."""
        self.join()
        self.add_json("config.json", config)
        for file in (self.folder / STATE, self._lock.path):
            file.unlink()
        fsync_folder(self.folder)
        old = self.target.parent / f".{self.target.name}.replaced"
        if self.target.is_dir() and any(self.target.iterdir()):
            os.rename(self.target, old)
        os.rename(self.folder, self.target)
        self._committed = True
        fsync_folder(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def join(self) -> int:
        """Make shards of the parts; returns their bytes.

        A part goes once all of it is in shards, so the disk holds one shard twice at most.
        """
        if self._pending:
            self.finish_part(self.saved)
        if self._layout is None:
            self._layout = self._plan_shards()
            self._write_state()
        total = len(self._layout)
        names = [
            "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            for number in range(total)
        ]
        for number, shard in enumerate(self._layout):
            if number >= self._shards_done:
                self._write_shard(self.folder / names[number], shard)
                self._shards_done = number + 1
                self._write_state()
            later = {part for rest in self._layout[number + 1 :] for *_, part in rest}
            for part in {part for *_, part in shard} - later:
                self._part(part).unlink(missing_ok=True)
        if total > 1:
            weight_map = {name: names[number] for number, shard in enumerate(self._layout) for name, *_ in shard}
            size = sum(_entry(item).nbytes for shard in self._layout for item in shard)
            self.add_json(INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
        return sum((self.folder / name).stat().st_size for name in names)

    def _plan_shards(self) -> list[list[tuple[str, str, list[int], int]]]:
        entries, part_of = [], {}
        for part in range(self.finished):
            for name, info in TensorStore([self._part(part)]).items():
                entries.append(Entry(name, info.dtype, info.shape))
                part_of[name] = part
        return [
            [(e.name, str(e.dtype).removeprefix("torch."), list(e.shape), part_of[e.name]) for e in shard]
            for shard in split_shards(entries, self.shard_bytes)
            if shard
        ]

    def _write_shard(self, path: Path, shard: list[tuple[str, str, list[int], int]]) -> None:
        stores = TensorStore([self._part(part) for part in sorted({part for *_, part in shard})])
        self._write_tensors(path, [_entry(item) for item in shard], _Loading(stores))


class _Loading:
    """The tensors of a store, each mapped while it is copied only, so that mapped pages do not add up."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store

    def __getitem__(self, name: str) -> torch.Tensor:
        self.store.close()
        return self.store.load(name)


def _entry(item: tuple[str, str, list[int], int]) -> Entry:
    name, dtype, shape, _ = item
    return Entry(name, getattr(torch, dtype), tuple(shape))

"""The calibration windows' hidden states between two layers: on the device, in memory, or in a file.

They are saved after every layer, so that a killed conversion goes on at the layer it was in. A copy that a crash cut
short, or that a disk changed, is told by its sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch

from qengine.errors import CheckpointError

DEVICE_BYTES = 3 << 29
"""States on a GPU together; 128 windows of 512 tokens of a model 5120 wide are 1.25 GiB."""
MEMORY_BYTES = 3 << 30
"""States in memory together; those beyond it are memory-mapped files."""
CHUNK_BYTES = 1 << 26


def fitting(shape: tuple[int, int, int], device: torch.device, count: int) -> list[str]:
    """Places for `count` states of a shape: on a GPU what DEVICE_BYTES hold, in memory what MEMORY_BYTES hold."""
    size = 4 * shape[0] * shape[1] * shape[2]
    on_device = 0 if device.type == "cpu" else min(count, DEVICE_BYTES // size)
    in_memory = min(count - on_device, MEMORY_BYTES // size)
    return ["device"] * on_device + ["memory"] * in_memory + ["file"] * (count - on_device - in_memory)


class Activations:
    """float32 [S, L, H]. `read` gives windows on `device`, `write` takes them; windows can be dropped for good.

    place: where they lie, "device", "memory" or "file" (see `fitting`). spill: makes the path of that file.
    """

    def __init__(
        self, shape: tuple[int, int, int], device: torch.device, place: str, spill: Callable[[], Path]
    ) -> None:
        self.device = device
        if place == "device":
            self._data = torch.empty(shape, dtype=torch.float32, device=device)
        elif place == "memory":
            self._data = _host_tensor(shape, device)
        else:
            mapped = np.memmap(spill(), dtype=np.float32, mode="w+", shape=shape)
            self._data = torch.from_numpy(mapped)
        self.alive = list(range(shape[0]))

    def __len__(self) -> int:
        """Windows that are left."""
        return len(self.alive)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(windows that are left, tokens, width)."""
        return len(self.alive), self._data.shape[1], self._data.shape[2]

    def read(self, start: int, end: int) -> torch.Tensor:
        """Windows start..end of those that are left, on the device; a copy unless they lie there in a row."""
        return self._data[self._rows(start, end)].to(self.device, non_blocking=self._data.is_pinned())

    def write(self, start: int, windows: torch.Tensor) -> None:
        """Replace windows from `start` on."""
        rows = self._rows(start, start + windows.shape[0])
        if isinstance(rows, slice):
            self._data[rows].copy_(windows)
        else:
            self._data[rows] = windows.to(self._data.device)

    def _rows(self, start: int, end: int) -> slice | list[int]:
        rows = self.alive[start:end]
        contiguous = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
        return slice(rows[0], rows[-1] + 1) if contiguous else rows

    def drop(self, bad: list[int]) -> None:
        """Leave out windows, by their place among those that are left."""
        gone = set(bad)
        self.alive = [row for place, row in enumerate(self.alive) if place not in gone]

    def save(self, path: Path) -> int:
        """Write all of it to `path`; returns the sum that `load` checks. May run in a thread beside `read`: on a GPU in
        a stream of its own, so what was written last must be there (see torch.cuda.synchronize)."""
        total = 0
        beside = torch.cuda.stream(torch.cuda.Stream(self._data.device)) if self._data.is_cuda else nullcontext()
        with open(path, "wb") as file, beside:
            for part in self._chunks():
                words = part.cpu().contiguous()
                total = (total + _sum(words)) % (1 << 62)
                file.write(words.numpy().data)
            file.flush()
        return total

    def load(self, path: Path, total: int) -> None:
        """Read what `save` wrote. CheckpointError if it is not the same."""
        found = 0
        expected = self._data.numel() * 4
        if not path.is_file() or os.path.getsize(path) != expected:
            raise _damaged(path)
        with open(path, "rb") as file:
            for part in self._chunks():
                words = torch.frombuffer(bytearray(file.read(part.numel() * 4)), dtype=torch.float32)
                found = (found + _sum(words)) % (1 << 62)
                part.copy_(words.view(part.shape))
        if found != total:
            raise _damaged(path)

    def _chunks(self) -> tuple[torch.Tensor, ...]:
        window = 4 * self._data.shape[1] * self._data.shape[2]
        return self._data.split(max(1, CHUNK_BYTES // window))


def _host_tensor(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """float32, empty; where a GPU reads it, in pages that it can copy from at full speed, if there are such."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # the system may allow a process few of them
            return torch.empty(shape, dtype=torch.float32, pin_memory=True)
    return torch.empty(shape, dtype=torch.float32)


def _sum(words: torch.Tensor) -> int:
    """Of the bits, eight bytes at a time where they come out even; it wraps around."""
    flat = words.reshape(-1)
    if flat.numel() % 2:
        return int(flat.view(torch.int32).sum(dtype=torch.int64))
    return int(flat.view(torch.int64).sum())


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"--resume: {path} is not what the unfinished conversion wrote; its activations are lost, so start over "
        "without --resume"
    )

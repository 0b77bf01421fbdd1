"""The limit of a GPU's memory, kept while the engine runs."""

from __future__ import annotations

from typing import Any

import torch
import triton

from qengine.engine.gpu_memory import MemoryLimit, outside_bytes


class MemoryGuard:
    """Keeps the process at its limit: torch's allocator may have what everything else leaves, less `room`.

    What is outside torch grows while it serves, with the kernels that are loaded and the graphs that are captured:
    `grown` says so, and the next `check` counts anew. room: bytes that may be taken before that.
    """

    def __init__(self, limit: MemoryLimit, device: torch.device, room: int) -> None:
        self._limit = limit
        self._device = device
        self._room = room
        self._total = torch.cuda.get_device_properties(device).total_memory
        self._stale = 0
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)
        self._tighten()

    def grown(self) -> None:
        """Something outside torch's allocator may have grown, now or in the next step."""
        self._stale = 2

    def check(self) -> None:
        """Count anew, if something may have grown; before a step."""
        if self._stale:
            self._stale -= 1
            self._tighten()

    def close(self) -> None:
        """Let torch take all of the device again."""
        triton.knobs.runtime.kernel_load_end_hook.remove(self._loaded)
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def _loaded(self, *_: Any, **__: Any) -> None:
        self.grown()

    def _tighten(self) -> None:
        allowed = max(self._limit.nbytes - outside_bytes(self._device) - self._room, 0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / self._total), self._device)
        if torch.cuda.memory_reserved(self._device) > allowed:
            torch.cuda.empty_cache()  # unused memory first: what is in use stays

"""The most memory of a GPU that this process takes, read while something runs."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from qengine.engine.gpu_memory import process_bytes

GIB = 1024**3


def used_bytes(device: torch.device) -> tuple[int, str]:
    """(bytes in use, who counted what): this process's by NVML, else all that is in use on the device."""
    held = process_bytes(device)
    if held is not None:
        return held, "this process, by NVML"
    free, total = torch.cuda.mem_get_info(device)
    return total - free, "the whole device, other processes included (NVML does not tell processes apart here)"


class PeakMemory:
    """`with PeakMemory(device) as peak: ...`; then `peak.gib` is the largest reading. Nothing on a CPU."""

    def __init__(self, device: torch.device, every: float = 0.05) -> None:
        self.nbytes = 0
        self.counted = ""
        self._device = device
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def gib(self) -> float | None:
        """GiB, or None if nothing was counted."""
        return self.nbytes / GIB if self.counted else None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self._stop.set()
            self._thread.join()
            self._read()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self._read()

    def _read(self) -> None:
        used, self.counted = used_bytes(self._device)
        self.nbytes = max(self.nbytes, used)

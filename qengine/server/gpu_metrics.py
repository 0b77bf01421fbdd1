"""Utilization and memory of the engine's GPU, as NVML counts them for the whole card."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A reading is used for so long: a query takes the driver up to a millisecond, and its own average is as old."""


@dataclass(frozen=True)
class GpuReading:
    """index, name: of the card. utilization: share of NVML's last sample in which a kernel ran, 0 to 1. used, total:
    bytes of its memory, other processes' included."""

    index: int
    name: str
    utilization: float
    used: int
    total: int


class GpuReader:
    """Reads one card. Where there is none, or NVML cannot be asked, `read` returns None."""

    def __init__(self, device: torch.device | None) -> None:
        self._handle: Any = None
        self._index = 0
        self._name = ""
        self._last: GpuReading | None = None
        self._read_at = 0.0
        if device is not None and device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._index = torch.cuda.current_device() if device.index is None else device.index
            properties = torch.cuda.get_device_properties(self._index)
            uuid = str(properties.uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._name = str(properties.name)
        except Exception as error:  # NVML raises classes of its own, and is optional
            logger.warning("no metrics of the GPU: NVML cannot be asked: %s", error)

    def read(self) -> GpuReading | None:
        """The card now, or as it was at most FRESH_SECONDS ago; None where it cannot be read."""
        now = time.monotonic()
        if self._handle is not None and (self._last is None or now - self._read_at > FRESH_SECONDS):
            self._last, self._read_at = self._ask(), now
        return self._last

    def _ask(self) -> GpuReading | None:
        import pynvml

        try:
            use = pynvml.nvmlDeviceGetUtilizationRates(self._handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception as error:  # the card may have fallen off the bus: the other metrics must still be served
            logger.warning("the GPU's metrics cannot be read any more: %s", error)
            self._handle = None
            return None
        return GpuReading(self._index, self._name, use.gpu / 100, int(memory.used), int(memory.total))

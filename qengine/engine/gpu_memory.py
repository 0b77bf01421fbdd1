"""How much of a GPU's memory this process takes, as the driver counts it, and the limit that is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from qengine.config import SMALL_CARD_GIB, CacheConfig
from qengine.errors import CapacityError

GIB = 1024**3
T = TypeVar("T")


def process_bytes(device: torch.device) -> int | None:
    """Bytes that NVML says this process holds on the device, its CUDA context and kernels included.

    None where NVML cannot tell (no driver, or process ids of a container that hides them among others).
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # NVML raises its own classes, and is optional
        return None
    own = [p for p in processes if p.pid == os.getpid()]
    if not own and len(processes) == 1:
        own = processes  # another process namespace: the only one there is this one
    used = own[0].usedGpuMemory if len(own) == 1 else None
    return int(used) if used else None


def context_bytes(device: torch.device) -> int:
    """`outside_bytes`, once the device has done all that was enqueued."""
    torch.cuda.synchronize(device)
    return outside_bytes(device)


def outside_bytes(device: torch.device) -> int:
    """What this process holds beyond torch's allocations: the context, compiled kernels, graphs.

    Where NVML cannot tell, all that is used on the device and is not torch's counts as this process's.
    """
    reserved = torch.cuda.memory_reserved(device)
    held = process_bytes(device)
    if held is None:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free
    return max(0, held - reserved)


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that the process may take, and in words where the number comes from."""

    nbytes: int
    source: str

    def __str__(self) -> str:
        return self.source


def memory_limit(cache: CacheConfig, device: torch.device) -> MemoryLimit:
    """The limit that the settings ask for. Raises CapacityError where the card is smaller than gpu_memory_limit."""
    total = torch.cuda.get_device_properties(device).total_memory
    if cache.gpu_memory_limit is None:
        share = cache.gpu_memory_utilization
        return MemoryLimit(int(total * share), f"gpu_memory_utilization={share:g} of {total / GIB:.2f} GiB")
    limit = int(cache.gpu_memory_limit * GIB)
    if limit > total:
        raise CapacityError(
            f"gpu_memory_limit={cache.gpu_memory_limit:g} GiB is more than the card's {total / GIB:.2f} GiB; lower it"
        )
    return MemoryLimit(limit, f"gpu_memory_limit={cache.gpu_memory_limit:g} GiB")


def is_small(cache: CacheConfig, device: torch.device) -> bool:
    """Whether the defaults should spare memory: less than 24 GiB by the card or by gpu_memory_limit."""
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    return min(total, cache.gpu_memory_limit or total) < SMALL_CARD_GIB


def with_room(device: torch.device, call: Callable[[], T]) -> T:
    """What `call` returns; where there is no memory for it, called once more when all that is unused was given back.

    The allocator does that by itself for its common pool, but neither from another one nor while it captures.
    """
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        pass  # and on outside of here: the exception holds the tensors of its frames
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return call()

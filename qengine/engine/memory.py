"""How many blocks the KV cache of a CPU gets: measured, and explained in numbers where it is too little."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from qengine.config import EngineConfig
from qengine.errors import CapacityError
from qengine.layers.attention import KVCache
from qengine.models import Decoder

GIB = 1024**3
CPU_SHARE = 0.5
"""Share of the CPU's free memory that the cache may take."""
CPU_USUAL_GIB = 1.0
"""The cache on a CPU stays below this unless one sequence of full length needs more."""


@dataclass(frozen=True)
class CachePlan:
    """Blocks of the cache, and most tokens of a sequence."""

    num_blocks: int
    max_model_len: int


def plan_cache(model: Decoder, config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> CachePlan:
    """Choose the number of blocks. max_model_len: the limit asked for, or the model's own.

    A limit that does not fit is lowered with a warning; if it was asked for explicitly, CapacityError. An explicit
    num_gpu_blocks_override is honoured beside an explicit max_model_len: prompts that the pool cannot hold are then
    refused one by one.
    """
    size = config.cache.block_size
    per_block = KVCache.bytes_per_block(model.spec, size, dtype)
    per_sequence = -(-max_model_len // size)
    override = config.cache.num_gpu_blocks_override
    if override is not None:
        blocks, source = override, f"num_gpu_blocks_override={override}"
    else:
        budget, source = cache_budget(config, per_block * per_sequence)
        blocks = max(0, min(budget // per_block, per_sequence * config.scheduler.max_num_seqs))
    return fit_length(blocks, source, max_model_len, config, size, per_block)


def fit_length(
    blocks: int, source: str, max_model_len: int, config: EngineConfig, size: int, per_block: int
) -> CachePlan:
    """The plan for so many blocks of `size` tokens and `per_block` bytes; `source` says where their number is from.

    A max_model_len that does not fit is lowered with a warning, or refused: CapacityError.
    """
    tokens = blocks * size
    override = config.cache.num_gpu_blocks_override
    if tokens >= max_model_len:
        return CachePlan(blocks, max_model_len)
    per_sequence = -(-max_model_len // size)
    numbers = (
        f"max_model_len={max_model_len} needs {per_sequence} blocks of {size} tokens "
        f"({per_sequence * per_block / GIB:.3f} GiB of KV cache), but {source} gives {blocks} blocks = {tokens} tokens"
    )
    remedy = "give the cache more memory (" + (
        "num_gpu_blocks_override"
        if override is not None
        else "gpu_memory_utilization, cpu_kv_cache_gib on a CPU, or a smaller kv_cache_dtype on a GPU"
    )
    asked = config.model.max_model_len is not None
    if tokens < 2 or ((asked or config.model.strict) and override is None):
        short = (per_sequence - blocks) * per_block / GIB
        raise CapacityError(f"{numbers}: {short:.3f} GiB are missing; lower max_model_len or {remedy})")
    if asked:
        warnings.warn(f"{numbers}; longer prompts are refused: {remedy})", stacklevel=3)
        return CachePlan(blocks, max_model_len)
    warnings.warn(f"{numbers}; max_model_len is lowered to {tokens}: {remedy}) for more", stacklevel=3)
    return CachePlan(blocks, tokens)


def cache_budget(config: EngineConfig, one_sequence: int) -> tuple[int, str]:
    """Bytes for the cache of a CPU, and where the number comes from. one_sequence: bytes of one of full length."""
    free = available_cpu_bytes()
    usual = max(int(CPU_USUAL_GIB * GIB), one_sequence)
    budget = min(int(free * CPU_SHARE), int(config.cache.cpu_kv_cache_gib * GIB), usual)
    return (
        budget,
        f"half of {free / GIB:.2f} GiB free memory, at most cpu_kv_cache_gib={config.cache.cpu_kv_cache_gib:g},",
    )


def available_cpu_bytes() -> int:
    """Memory that can be had without swapping: what the system has free, or what is left of the container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = group / limit_name, group / usage_name
        if limit.is_file() and usage.is_file():
            text = limit.read_text().strip()
            if text.isdigit():
                free = min(free, max(0, int(text) - int(usage.read_text())))
    return free

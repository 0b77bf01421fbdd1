"""How many blocks the KV cache gets: measured, never guessed, and explained in numbers where it is too little."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from qengine.config import EngineConfig
from qengine.errors import CapacityError
from qengine.layers.attention import DenseContext, KVCache
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
        budget, source = cache_budget(model, config, per_block * per_sequence)
        blocks = max(0, min(budget // per_block, per_sequence * config.scheduler.max_num_seqs))
    tokens = blocks * size
    if tokens >= max_model_len:
        return CachePlan(blocks, max_model_len)
    numbers = (
        f"max_model_len={max_model_len} needs {per_sequence} blocks of {size} tokens "
        f"({per_sequence * per_block / GIB:.3f} GiB of KV cache), but {source} gives {blocks} blocks = {tokens} tokens"
    )
    remedy = "give the cache more memory (" + (
        "num_gpu_blocks_override"
        if override is not None
        else "cpu_kv_cache_gib"
        if model.device.type == "cpu"
        else "gpu_memory_utilization"
    )
    if tokens < 2 or (config.model.max_model_len is not None and override is None):
        short = (per_sequence - blocks) * per_block / GIB
        raise CapacityError(f"{numbers}: {short:.3f} GiB are missing; lower max_model_len or {remedy})")
    if config.model.max_model_len is not None:
        warnings.warn(f"{numbers}; longer prompts are refused: {remedy})", stacklevel=2)
        return CachePlan(blocks, max_model_len)
    warnings.warn(f"{numbers}; max_model_len is lowered to {tokens}: {remedy}) for more", stacklevel=2)
    return CachePlan(blocks, tokens)


def cache_budget(model: Decoder, config: EngineConfig, one_sequence: int) -> tuple[int, str]:
    """Bytes for the cache, and in words where the number comes from. one_sequence: bytes of one of full length."""
    if model.device.type == "cpu":
        free = available_cpu_bytes()
        usual = max(int(CPU_USUAL_GIB * GIB), one_sequence)
        budget = min(int(free * CPU_SHARE), int(config.cache.cpu_kv_cache_gib * GIB), usual)
        words = f"half of {free / GIB:.2f} GiB free memory, at most cpu_kv_cache_gib={config.cache.cpu_kv_cache_gib:g},"
        return budget, words
    peak = activation_bytes(model, config)
    free, total = torch.cuda.mem_get_info(model.device)
    # What torch holds but does not use is counted as used by the driver, yet the cache can have it.
    spare = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    used = total - free - spare
    budget = int(total * config.cache.gpu_memory_utilization) - used - peak
    words = (
        f"gpu_memory_utilization={config.cache.gpu_memory_utilization:g} of {total / GIB:.2f} GiB, less "
        f"{used / GIB:.2f} GiB in use and {peak / GIB:.2f} GiB for activations,"
    )
    return budget, words


@torch.inference_mode()
def activation_bytes(model: Decoder, config: EngineConfig) -> int:
    """Peak bytes of a step of max_num_batched_tokens tokens and of the logits of max_num_seqs rows, by trying it."""
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    try:
        hidden = model.forward(ids, torch.arange(tokens, device=model.device), DenseContext(1, tokens))
        logits = model.logits(hidden[:1].expand(min(rows, tokens), -1))
        # The sampler holds the logits, a changed copy and float64 sums at most.
        logits.double().cumsum(dim=-1)
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"a step of {tokens} tokens does not fit the memory left beside the weights "
            f"({model.memory_bytes() / GIB:.2f} GiB): {error}; lower max_num_batched_tokens or max_num_seqs"
        ) from error
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del ids, hidden, logits
    torch.cuda.empty_cache()
    return peak


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

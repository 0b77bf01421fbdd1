"""From a loaded model to a runner on a GPU: what is left of the memory becomes the paged pool."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from qengine.config import EngineConfig
from qengine.engine.cuda_graphs import TOKENS
from qengine.engine.cuda_swap import STAGING_BYTES
from qengine.engine.gpu_memory import GIB, MemoryLimit, context_bytes, is_small, memory_limit
from qengine.engine.gpu_runner import GpuRunner, LaunchedStep
from qengine.engine.key_axes import key_axes
from qengine.engine.memory import CachePlan, fit_length
from qengine.engine.memory_guard import MemoryGuard
from qengine.engine.startup_steps import largest_steps
from qengine.errors import CapacityError, ConfigError
from qengine.kernels.fused.card import capability
from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool
from qengine.kernels.w4a16.ops import spare_memory
from qengine.models import Decoder
from qengine.models.spec import ModelSpec

GRAPH_LAYER_BYTES = 30 << 10
"""What a captured graph takes of the device for each layer, beside torch's memory: 51 graphs of 32 and of 28 layers
took 44 and 42 MiB on an H200 (CUDA 13), kernels loaded meanwhile included. NVML counts in pieces of 2 MiB, so that no
single graph can be measured."""
MARGIN = 80 << 20
"""Bytes left free: kernels that are loaded later, and what the allocator's pieces waste."""
ROOM_OUTSIDE = 16 << 20
"""The part of the margin that torch's allocator is refused."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a GPU that a model takes: weights, step (largest activations), graphs, context (driver and kernels),
    margin, and the cache, which is what the limit leaves."""

    weights: int
    step: int
    graphs: int
    context: int
    margin: int
    cache: int


def cache_kind(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Kind:
    """How the cache holds values. Raises ConfigError for a kind that the card or the compute dtype cannot have."""
    name, plain = config.cache.kv_cache_dtype, str(dtype).removeprefix("torch.")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={plain!r} is not served on a GPU; use 'float16' or 'bfloat16'")
    if name == "auto":
        name = "int8" if is_small(config.cache, device) else plain
    if name == "fp8" and capability(device) < 89:
        raise ConfigError("kv_cache_dtype='fp8' needs compute capability 8.9; use 'int8' on this card")
    if name not in (plain, "int8", "int4", "fp8"):
        raise ConfigError(
            f"kv_cache_dtype={name!r} does not go with compute dtype {plain}; use {plain!r}, 'int8', 'int4' or 'auto'"
        )
    return name  # type: ignore[return-value]


def cache_layout(config: EngineConfig, spec: ModelSpec, kind: Kind) -> BlockLayout:
    """The blocks of the pool. Raises ConfigError for a size that the kernels do not serve."""
    try:
        return BlockLayout(kind, spec.num_kv_heads, spec.head_dim, config.cache.block_size)
    except ValueError as error:
        raise ConfigError(f"{error}; block_size on a GPU is 8 to 1024") from None


def block_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a cache block over all layers."""
    return KVPool.bytes_per_block(spec.num_layers, cache_layout(config, spec, cache_kind(config, dtype, device)))


def device_runner(
    model: Decoder, config: EngineConfig, dtype: torch.dtype, max_model_len: int, vocab_size: int
) -> tuple[GpuRunner, CachePlan, MemoryUse]:
    """A runner whose pool takes what the limit leaves beside weights, activations and context, which are measured, and
    graphs, which are counted before they are captured."""
    device = model.device
    layout = cache_layout(config, model.spec, cache_kind(config, dtype, device))
    limit = memory_limit(config.cache, device)
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)
    spare_memory(device, is_small(config.cache, device))
    stream = torch.cuda.Stream(device)
    step, graphs = _measure(model, config, layout, vocab_size, max_model_len, limit, stream)
    context = context_bytes(device)
    margin = MARGIN + (STAGING_BYTES if config.cache.swap_space else 0)
    cache = limit.nbytes - context - weights - step - graphs - margin
    per_block = KVPool.bytes_per_block(model.spec.num_layers, layout)
    per_sequence = -(-max_model_len // layout.block_size)
    most = per_sequence * config.scheduler.max_num_seqs
    override = config.cache.num_gpu_blocks_override
    words = (
        f"{limit}, less {weights / GIB:.2f} GiB of weights, {step / GIB:.2f} for a step of "
        f"{config.scheduler.max_num_batched_tokens} tokens, {graphs / GIB:.2f} for graphs and {context / GIB:.2f} for "
        "the CUDA context and kernels,"
    )
    found = max(0, min(cache // per_block, most)) if override is None else override
    plan = fit_length(
        found,
        words if override is None else f"num_gpu_blocks_override={override}",
        max_model_len,
        config,
        layout.block_size,
        per_block,
    )
    try:
        pool = KVPool.allocate(layout, model.spec.num_layers, plan.num_blocks, device)
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"the KV cache of {plan.num_blocks} blocks cannot be allocated: {error}; another process may have taken "
            "memory since it was measured: start again, or lower gpu_memory_utilization"
        ) from error
    if pool.axes is not None:
        pool.axes.copy_(key_axes(model))
    runner = _runner(model, pool, config, plan.max_model_len, vocab_size, stream)
    if config.cache.gpu_memory_limit is not None:
        runner.guard_memory(MemoryGuard(limit, device, ROOM_OUTSIDE))
    return runner, plan, MemoryUse(weights, step, graphs, context, margin, plan.num_blocks * per_block)


def _runner(
    model: Decoder,
    pool: KVPool,
    config: EngineConfig,
    max_model_len: int,
    vocab_size: int,
    stream: torch.cuda.Stream,
) -> GpuRunner:
    rope = (layer.rope for layer in model.spec.layers)
    dynamic = any(r is not None and r.kind == "dynamic" for r in rope)
    if dynamic and not config.device.enforce_eager:
        warnings.warn(
            "the model's dynamic rope depends on lengths in a way that no CUDA graph can hold; steps are eager",
            stacklevel=3,
        )
    return GpuRunner(model, pool, vocab_size, stream=stream, **runner_options(config, model.spec, max_model_len))


def runner_options(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> dict[str, Any]:
    """GpuRunner's settings but for its stream."""
    dynamic = any(layer.rope is not None and layer.rope.kind == "dynamic" for layer in spec.layers)
    return {
        "max_num_seqs": most_rows(config),
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "graphs": not (config.device.enforce_eager or dynamic),
    }


def most_rows(config: EngineConfig) -> int:
    """Sequences that a step may have."""
    return min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)


@torch.inference_mode()
def _measure(
    model: Decoder,
    config: EngineConfig,
    layout: BlockLayout,
    vocab_size: int,
    max_model_len: int,
    limit: MemoryLimit,
    stream: torch.cuda.Stream,
) -> tuple[int, int]:
    """(bytes that steps take, bytes of all graphs beside them): the largest steps, on a pool of just their blocks."""
    device = model.device
    tokens = config.scheduler.max_num_batched_tokens
    rows = most_rows(config)
    size = layout.block_size
    blocks = max(-(-tokens // size), rows)
    try:
        pool = KVPool.allocate(layout, model.spec.num_layers, blocks, device)
        # reserved, not allocated: what the allocator cannot use between its pieces is gone too
        before = torch.cuda.memory_reserved(device)
        runner = _runner(model, pool, config, max_model_len, vocab_size, stream)
        torch.cuda.reset_peak_memory_stats(device)
        under_way: LaunchedStep | None = None
        for items in largest_steps(tokens, rows, max_model_len, size, TOKENS[-1]):
            # as the engine does it: what one step holds until its tokens are there is held beside the next
            launched = runner.launch(items, [])
            if under_way is not None:
                under_way.result()
            under_way = launched
        if under_way is not None:
            under_way.result()
        del under_way, launched
        step = torch.cuda.max_memory_reserved(device) - before
        graphs = runner.most_graphs * model.spec.num_layers * GRAPH_LAYER_BYTES
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"a step of {tokens} tokens does not fit {limit} beside {model.memory_bytes() / GIB:.2f} GiB of weights: "
            f"{error}; lower max_num_batched_tokens or max_num_seqs"
        ) from error
    del runner, pool
    gc.collect()
    torch.cuda.empty_cache()
    return step, graphs

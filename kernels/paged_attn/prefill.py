"""Attention of prompt chunks over the paged cache: `paged_prefill`, its launches and its plain-torch reference.

`qengine::paged_prefill` is a torch operator with a fake implementation, so torch.compile sees through it. Nothing here
waits for the device or reads a length on the host: the grid is an upper bound of the tiles, which their own kernel puts
in order, most keys first. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import math

import torch
import triton

from qengine.kernels import turing
from qengine.kernels.operator import operator

from .cache import LayerCache, gather_kv
from .prefill_kernel import paged_prefill_kernel
from .prefill_launch import PrefillLaunch, head_chunk, hopper_size, kernel_kind, parts, pick_prefill
from .prefill_tiles import prefill_tiles, tile_count
from .ref import causal_attention

LOG2E = math.log2(math.e)


@functools.lru_cache
def capability(index: int) -> int:
    """Compute capability that Triton compiles for on a device, with the hook for Turing set where it is needed."""
    major, minor = torch.cuda.get_device_capability(index)
    override = triton.knobs.runtime.override_arch
    sm = int("".join(c for c in override if c.isdigit())) if override else major * 10 + minor
    turing.ensure(sm)
    return sm


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a device; 4 for the CPU, where only the interpreter asks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def run_prefill(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    launch: PrefillLaunch,
    *,
    max_query_len: int,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    asm: bool = True,
) -> None:
    """`paged_prefill` with the given launch, arguments unchecked. asm: False in Triton's interpreter."""
    tokens, heads, size = q.shape
    sequences = seq_lens.shape[0]
    kind = kernel_kind(cache.kind)
    first, second = parts(size, kind, launch.whole)
    listed = sequences > 1
    tiles = prefill_tiles(query_starts, seq_lens, tokens, launch.rows) if listed else seq_lens
    count = tile_count(tokens, sequences, launch.rows, max_query_len)
    groups = heads // launch.pack
    chunk = head_chunk(groups, count, multiprocessors(q.device))
    if launch.hopper:
        _run_hopper(
            q,
            cache,
            block_tables,
            seq_lens,
            query_starts,
            tiles,
            out,
            launch,
            count,
            chunk,
            scale,
            softcap,
            sliding_window,
        )
        return
    paged_prefill_kernel[(count * groups,)](
        q,
        cache.k.view(torch.uint8) if kind == "fp8" else cache.k,
        cache.v.view(torch.uint8) if kind == "fp8" else cache.v,
        q if cache.k_scale is None else cache.k_scale,
        q if cache.v_scale is None else cache.v_scale,
        block_tables,
        seq_lens,
        query_starts,
        tiles,
        out,
        count,
        chunk,
        q.stride(0) // 8,
        out.stride(0) // 8,
        cache.k.stride(0) * cache.k.element_size() // 16,
        0 if cache.k_scale is None else cache.k_scale.stride(0),
        block_tables.stride(0),
        scale * LOG2E if softcap is None else 2.0 * LOG2E * scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        sliding_window or 0,
        GROUP=heads // cache.kv_heads,
        PACK=launch.pack,
        HEAD=size,
        D1=first,
        D2=second,
        BS=cache.block_size,
        BM=launch.bm,
        BN=launch.bn,
        KIND=kind,
        OFFSETS=cache.key_offsets,
        LISTED=listed,
        SOFTCAP=softcap is not None,
        SLIDING=sliding_window is not None,
        SPLIT=launch.split,
        PREFETCH=launch.prefetch,
        SUMS=launch.sums,
        ASM=asm,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def _run_hopper(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    launch: PrefillLaunch,
    count: int,
    chunk: int,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .prefill_hopper import hopper_prefill_kernel

    heads, size = q.shape[1:]
    # keys and values of a 16-bit cache are rows of one table: a block is a whole number of rows
    block_rows = cache.k.stride(0) // size
    v_rows = (cache.v.data_ptr() - cache.k.data_ptr()) // (2 * size)
    box = min(cache.block_size, launch.bn)
    shape = [(cache.num_blocks - 1) * block_rows + v_rows + cache.kv_heads * cache.block_size, size]
    descriptor = TensorDescriptor(cache.k, shape, [size, 1], [box, 64], gl.NVMMASharedLayout(128, 16, 2))
    hopper_prefill_kernel[(count * (heads // launch.pack),)](
        q,
        descriptor,
        block_tables,
        seq_lens,
        query_starts,
        tiles,
        out,
        count,
        chunk,
        q.stride(0) // 8,
        out.stride(0) // 8,
        block_rows,
        v_rows,
        block_tables.stride(0),
        scale * LOG2E if softcap is None else 2.0 * LOG2E * scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        sliding_window or 0,
        GROUP=heads // cache.kv_heads,
        PACK=launch.pack,
        HEAD=size,
        DP=hopper_size(size),
        BS=cache.block_size,
        BN=launch.bn,
        BOX=box,
        STAGES=launch.stages,
        LISTED=seq_lens.shape[0] > 1,
        SOFTCAP=softcap is not None,
        SLIDING=sliding_window is not None,
        PIN=launch.split,
        num_warps=4,
    )


def paged_prefill_ref(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> None:
    """Plain torch twin of `paged_prefill`: float32 arithmetic, one sequence after the other."""
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        if length == 0:
            out[rows] = 0
        elif starts[row] < starts[row + 1]:
            k, v = gather_kv(cache, block_tables[row], length)
            part = causal_attention(q[rows].float(), k, v, scale=scale, softcap=softcap, sliding_window=sliding_window)
            out[rows] = part.to(out.dtype)


@operator("qengine::paged_prefill", mutates_args=("out",))
def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    max_query_len: int,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> None:
    cache = LayerCache(k, v, k_scale, v_scale, kind, k.shape[1], q.shape[2], k.shape[2])  # type: ignore[arg-type]
    options = {"scale": scale, "softcap": softcap, "sliding_window": sliding_window}
    if not q.is_cuda:
        paged_prefill_ref(q, cache, block_tables, seq_lens, query_starts, out, **options)  # type: ignore[arg-type]
        return
    sm = capability(q.device.index or 0)
    launch = pick_prefill(sm, q.shape[2], cache.kind, q.shape[1] // cache.kv_heads, max_query_len)
    run_prefill(
        q, cache, block_tables, seq_lens, query_starts, out, launch, max_query_len=max_query_len, **options  # type: ignore[arg-type]
    )  # fmt: skip


@_prefill.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    max_query_len: int,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> None:
    return None


def paged_prefill(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> None:
    """Causal attention of each sequence's last tokens to all its keys, which the cache already holds; writes `out`.

    q, out: float16 or bfloat16 [T, Hq, D], their rows at any multiple of 8 elements (views into a wider tensor).
    block_tables int32 [P, MB], seq_lens int32 [P] (keys of each sequence, the new ones included; 0: its rows of out
    become 0), query_starts int32 [P + 1]: rows query_starts[p] to query_starts[p + 1] - 1 of q are sequence p's last
    tokens; rows outside are left alone. max_query_len: a bound of every sequence's new tokens, known on the host.
    scale: of the scores, above 0. softcap c: s <- c tanh(s / c). sliding_window: keys a query sees, its own included.

    Raises ValueError for what does not fit. CPU tensors are served by the reference; CUDA tensors never are.
    """
    reason = why_not_prefill(q, cache, out, block_tables, seq_lens, query_starts, scale, softcap, sliding_window)
    if reason:
        raise ValueError(f"paged prefill: {reason}")
    if q.shape[0] and seq_lens.shape[0] and max_query_len > 0:
        _prefill(
            q, cache.k, cache.v, cache.k_scale, cache.v_scale, block_tables, seq_lens, query_starts, out, cache.kind,
            max_query_len, scale, softcap, sliding_window,
        )  # fmt: skip


def why_not_prefill(
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> str | None:
    """What keeps `paged_prefill` from serving these arguments, or None."""
    size = cache.head_dim
    if q.dim() != 3 or q.shape[2] != size or q.shape[1] % cache.kv_heads:
        return f"q must be [tokens, a multiple of {cache.kv_heads} heads, {size}], got {list(q.shape)}"
    if out.shape != q.shape or out.dtype != q.dtype:
        return f"out must be {q.dtype} {list(q.shape)} as q is, got {out.dtype} {list(out.shape)}"
    for name, x in (("q", q), ("out", out)):
        if x.stride(2) != 1 or x.stride(1) != size or x.stride(0) % 8:
            return f"{name} must have contiguous heads and rows at multiples of 8 elements, got strides {x.stride()}"
    for name, x in (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_starts", query_starts)):
        if x.dtype != torch.int32 or x.stride(-1) != 1:
            return f"{name} must be contiguous int32, got {x.dtype} with strides {x.stride()}"
    if query_starts.shape[0] != seq_lens.shape[0] + 1 or block_tables.shape[0] != seq_lens.shape[0]:
        return (
            f"seq_lens [P], query_starts [P + 1] and block_tables [P, blocks] do not fit: {list(seq_lens.shape)}, "
            f"{list(query_starts.shape)}, {list(block_tables.shape)}"
        )
    if scale <= 0 or (softcap is not None and softcap <= 0) or (sliding_window is not None and sliding_window < 1):
        return f"scale={scale}, softcap={softcap} and sliding_window={sliding_window} must be above 0"
    return _card_lacks(q, cache) if q.is_cuda else None


def _card_lacks(q: torch.Tensor, cache: LayerCache) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q is {q.dtype}; float16 and bfloat16 are served on a GPU"
    if cache.kind in ("float16", "bfloat16") and q.dtype != cache.k.dtype:
        return f"q is {q.dtype} and the cache {cache.kind}; they must be the same, or the cache quantized"
    sm = capability(q.device.index or 0)
    if q.dtype == torch.bfloat16 and sm < 80:
        return "bfloat16 needs compute capability 8.0; use float16 on this card"
    if cache.kind == "fp8" and sm < 89:
        return "an fp8 cache needs compute capability 8.9; use int8 on this card"
    return None

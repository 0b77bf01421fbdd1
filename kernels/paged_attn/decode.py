"""Decode attention on a paged cache: `paged_decode` for models, `run` for a given launch.

Nothing here allocates or waits for the device, so a step can be captured in a CUDA graph once `reserve` has been
called on the capturing stream: partial results and counters live in the workspace that the packed GEMM uses too. The
grid depends on shapes and on max_seq_len only; how the work is shared out follows from the lengths on the device.
"""

from __future__ import annotations

import functools
import math

import torch
import triton

from qengine.kernels import turing
from qengine.kernels.fused.card import launch_options
from qengine.kernels.operator import operator
from qengine.kernels.w4a16.ops import workspace

from .cache import LayerCache, gather_kv
from .decode_kernel import paged_decode_kernel
from .decode_launch import DecodeLaunch, DecodeShape, part_floats, pick_decode, programs
from .decode_operands import SCORE_UNIT
from .ref import last_token_attention

MAX_ROWS = 2048
"""Sequences of one launch; more are served by several."""
LOG2_E = 1 / math.log(2)


@functools.lru_cache
def _device(index: int) -> tuple[int, int]:
    """(compute capability that Triton compiles for, multiprocessors)."""
    properties = torch.cuda.get_device_properties(index)
    sm = properties.major * 10 + properties.minor
    override = triton.knobs.runtime.override_arch
    if override:
        sm = int("".join(c for c in override if c.isdigit()))
    turing.ensure(sm)
    return sm, properties.multi_processor_count


def paged_decode_ref(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """What `paged_decode` computes, float32 [S, Hq, D], in plain torch: `ref.last_token_attention` a sequence."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length > 0:
            k, v = gather_kv(cache, block_tables[row], length)
            out[row] = last_token_attention(
                q[row].float(), k, v, scale=scale, softcap=softcap, sliding_window=sliding_window
            )
    return out


def shape_of(q: torch.Tensor, cache: LayerCache) -> DecodeShape:
    """What the launch of queries [S, Hq, D] over a cache follows from."""
    return DecodeShape(cache.kind, cache.head_dim, q.shape[1] // cache.kv_heads, cache.block_size, cache.key_offsets)


def run(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    launch: DecodeLaunch,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    max_seq_len: int,
    num_splits: int | None = None,
) -> None:
    """`paged_decode` with the given launch, on the current stream; all tensors on one GPU."""
    shape = shape_of(q, cache)
    space, locks = workspace(q.device)
    room = min(space.numel() // 4 // part_floats(shape), locks.numel() // 2)
    for start in range(0, q.shape[0], MAX_ROWS):
        rows = slice(start, min(start + MAX_ROWS, q.shape[0]))
        count = programs(
            launch, shape, cache.kv_heads, rows.stop - start, max_seq_len, _device(q.device.index or 0)[1], room,
            num_splits,
        )  # fmt: skip
        _launch(q[rows], cache, block_tables[rows], seq_lens[rows], out[rows], launch, shape, count, space, locks,
                scale, softcap, sliding_window)  # fmt: skip


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    launch: DecodeLaunch,
    shape: DecodeShape,
    count: int,
    space: torch.Tensor,
    locks: torch.Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> None:
    to_score, cap = score_factors(scale, softcap, cache.kind)
    parts = space.view(torch.float32)
    stats = parts[2 * count * shape.live * shape.padded :]
    rows = q.shape[0]
    options = launch_options(launch.pdl)
    if launch.registers is not None:
        options["maxnreg"] = launch.registers
    paged_decode_kernel[(count,)](
        q.view(torch.int32),
        cache.k.view(torch.int32),
        cache.v.view(torch.int32),
        parts if cache.k_scale is None else cache.k_scale,
        parts if cache.v_scale is None else cache.v_scale,
        block_tables,
        seq_lens,
        out,
        parts,
        stats,
        locks,
        to_score,
        cap,
        rows,
        sliding_window or 0,
        q.stride(0) // 8,
        out.stride(0),
        block_tables.stride(0),
        cache.k.stride(0) * cache.k.element_size() // 16,
        launch.min_tiles,
        **shape.constants(launch, cache.kv_heads),
        QBF=q.dtype == torch.bfloat16,
        SB=rows_bucket(rows),
        HAS_CAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None,
        ASM=True,
        num_warps=launch.warps,
        num_stages=1,
        **options,
    )


def score_factors(scale: float, softcap: float | None, kind: str) -> tuple[float, float]:
    """The kernel's (to_score, cap): exponents are of base 2; scores of fp8 and int4 keys come in units of their own."""
    lift = {"fp8": 256.0, "int4": 1.0 / SCORE_UNIT.value}.get(kind, 1.0)
    if softcap is None:
        return scale * LOG2_E * lift, 0.0
    return 2.0 * LOG2_E * scale / softcap * lift, softcap * LOG2_E


def rows_bucket(rows: int) -> int:
    """The kernel's SB: few sizes, so that few variants are compiled."""
    return next(size for size in (256, MAX_ROWS) if rows <= size)


@operator("qengine::paged_decode", mutates_args=("out",))
def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    max_seq_len: int,
    num_splits: int | None,
) -> None:
    cache = LayerCache(k, v, k_scale, v_scale, kind, k.shape[1], q.shape[2], k.shape[2])  # type: ignore[arg-type]
    if not q.is_cuda:
        result = paged_decode_ref(
            q, cache, block_tables, seq_lens, scale=scale, softcap=softcap, sliding_window=sliding_window
        )
        out.copy_(result)
        return
    shape = shape_of(q, cache)
    launch = pick_decode(shape, q.shape[0], max_seq_len, _device(q.device.index or 0)[0])
    run(
        q, cache, block_tables, seq_lens, out, launch, scale=scale, softcap=softcap, sliding_window=sliding_window,
        max_seq_len=max_seq_len, num_splits=num_splits,
    )  # fmt: skip


@_decode.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    max_seq_len: int,
    num_splits: int | None,
) -> None:
    return None


def paged_decode(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    max_seq_len: int,
    num_splits: int | None = None,
) -> None:
    """out [S, Hq, D] = attention of each sequence's newest token, q [S, Hq, D], to all its cached tokens.

    q and out: float16 or bfloat16 (any float on the CPU), the last two dimensions contiguous, stride(0) free.
    block_tables int32 [S, MB], seq_lens int32 [S]: cached tokens, the newest included; 0 gives a row of zeros.
    softcap c: s <- c tanh(s / c). sliding_window: tokens a query sees, its own included. max_seq_len: an upper bound of
    seq_lens, known to the host; it sizes the grid and nothing else. num_splits: programs for each sequence and KV head,
    None for as many as fill the card. From compute capability 9.0 on seq_lens is read while the kernel ahead of this
    one on the stream may still run: that kernel must not be what writes it.

    Equal inputs give equal bits; which other sequences are in the step may change a result in its last bits. Raises
    ValueError for what does not fit. CPU tensors are served by `paged_decode_ref`, CUDA tensors never.
    """
    _check(q, cache, block_tables, seq_lens, out)
    options = (("scale", scale), ("softcap", softcap), ("sliding_window", sliding_window), ("num_splits", num_splits))
    for name, value in options:
        if value is not None and value <= 0:
            raise ValueError(f"paged_decode: {name}={value}, must be positive")
    if q.shape[0]:
        _decode(
            q, cache.k, cache.v, cache.k_scale, cache.v_scale, block_tables, seq_lens, out, cache.kind, scale, softcap,
            sliding_window, max_seq_len, num_splits,
        )  # fmt: skip


def _check(
    q: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if q.dim() != 3 or q.shape[2] != cache.head_dim or q.shape[1] % cache.kv_heads:
        raise ValueError(
            f"paged_decode: q must be [S, a multiple of {cache.kv_heads}, {cache.head_dim}], got {list(q.shape)}"
        )
    rows, _, size = q.shape
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"paged_decode: out must be {q.dtype} {list(q.shape)}, got {out.dtype} {list(out.shape)}")
    if block_tables.dim() != 2 or block_tables.shape[0] != rows or seq_lens.shape != (rows,):
        raise ValueError(
            f"paged_decode: block_tables must be [{rows}, blocks] and seq_lens [{rows}],"
            f" got {list(block_tables.shape)} and {list(seq_lens.shape)}"
        )
    if block_tables.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError(f"paged_decode: tables and lengths must be int32, got {block_tables.dtype}, {seq_lens.dtype}")
    for name, x in (("q", q), ("out", out)):
        if rows and (x.stride(2) != 1 or x.stride(1) != size):
            raise ValueError(f"paged_decode: the heads of a row of {name} must lie one after the other")
    if q.is_cuda and q.stride(0) % 8:
        raise ValueError(f"paged_decode: rows of q must lie a multiple of 16 bytes apart, not {2 * q.stride(0)}")
    if block_tables.shape[1] and rows and (block_tables.stride(1) != 1 or not seq_lens.is_contiguous()):
        raise ValueError("paged_decode: rows of block_tables and seq_lens must be contiguous")
    if any(x.device != q.device for x in (cache.k, cache.v, block_tables, seq_lens, out)):
        raise ValueError(f"paged_decode: all tensors must be on {q.device}, as q is")
    if q.is_cuda:
        _check_device(q, cache)


def _check_device(q: torch.Tensor, cache: LayerCache) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"paged_decode: q is {q.dtype}; float16 and bfloat16 are served on a GPU")
    sm = _device(q.device.index or 0)[0]
    if sm < 80 and (q.dtype == torch.bfloat16 or cache.kind == "bfloat16"):
        raise ValueError("paged_decode: bfloat16 needs compute capability 8.0; use float16 on this card")
    if not 8 <= cache.head_dim <= 256 or cache.head_dim % 8:
        raise ValueError(f"paged_decode: head_dim={cache.head_dim}, must be a multiple of 8 up to 256")

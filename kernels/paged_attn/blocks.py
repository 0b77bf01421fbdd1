# mypy: disable-error-code="no-untyped-def"
"""Moving whole blocks of the cache: copies within it, and swaps with one contiguous buffer in pinned host memory.

A block is scattered over the pool, one piece of `block_bytes` a layer. A kernel that reads the pieces and writes the
buffer (or the other way round), 16 bytes a thread, reaches the host over PCIe without a copy on the device and with
one launch, however many pieces there are. A few programs are enough to keep the link busy, so that the rest of the
card computes meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache import KVPool

LINK, DEVICE = (8, 4), (256, 8)
"""(programs, warps) of a launch whose buffer is on the host, or on the device."""
CHUNK = 4096
"""int32 words that a program moves at a time."""
COPY_BYTES = 8 << 20
"""Bytes that `copy_blocks` holds aside at a time, where one layer of all its blocks is no more."""


@triton.jit
def move_kernel(
    pool_ptr, buffer_ptr, ids_ptr, chunks, words, layers, first_layer, pool_layer, id_stride, GATHER: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """buffer [n, layers, words] <- pool [layer, ids[i], words] (GATHER), or back; words of int32.

    chunks: n * layers * ceil(words / CHUNK), dealt in turn to the programs. pool_layer: words of a layer of the pool.
    """
    per_piece = tl.cdiv(words, CHUNK)
    within = tl.arange(0, CHUNK)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        piece = chunk // per_piece
        start = chunk % per_piece * CHUNK
        block = tl.load(ids_ptr + (piece // layers) * id_stride)
        layer = (first_layer + piece % layers).to(tl.int64)
        inside = start + within < words
        at_pool = pool_ptr + layer * pool_layer + block * words + start + within
        at_buffer = buffer_ptr + piece.to(tl.int64) * words + start + within
        if GATHER:
            tl.store(at_buffer, tl.load(at_pool, mask=inside), mask=inside)
        else:
            tl.store(at_pool, tl.load(at_buffer, mask=inside), mask=inside)


def gather_blocks(pool: KVPool, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i, l] = the bytes of block block_ids[i] of layer l, on the current stream.

    block_ids int64 [n] on the pool's device; buffer uint8 [n, L, block_bytes], contiguous, on that device or in pinned
    host memory. Nothing waits: the host may read the buffer once an event recorded after this call has passed. Raises
    ValueError for what does not fit.
    """
    _check(pool, block_ids, buffer)
    if pool.storage.is_cuda:
        run_move(pool, block_ids, buffer, gather=True)
    else:
        gather_blocks_ref(pool, block_ids, buffer)


def scatter_blocks(pool: KVPool, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """The bytes of block block_ids[i] of layer l = buffer[i, l]: the other way of `gather_blocks`, ids all different.

    The buffer must stay as it is until an event recorded after this call has passed.
    """
    _check(pool, block_ids, buffer)
    if pool.storage.is_cuda:
        run_move(pool, block_ids, buffer, gather=False)
    else:
        scatter_blocks_ref(pool, block_ids, buffer)


def copy_blocks(pool: KVPool, pairs: torch.Tensor) -> None:
    """Copy block pairs[i, 0] to pairs[i, 1] in all layers; all sources are read before anything is written.

    pairs int64 [n, 2] on the pool's device, destinations all different. Goes through a buffer on the device, some
    layers at a time. Raises ValueError for what does not fit.
    """
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64 or pairs.device != pool.storage.device:
        wanted = f"int64 [n, 2] on {pool.storage.device}"
        raise ValueError(f"copy_blocks: pairs must be {wanted}, got {list(pairs.shape)} {pairs.dtype} {pairs.device}")
    if not pairs.shape[0]:
        return
    if not pool.storage.is_cuda:
        copy_blocks_ref(pool, pairs)
        return
    count, piece = pairs.shape[0], pool.layout.block_bytes
    layers = max(1, min(pool.num_layers, COPY_BYTES // (count * piece)))
    aside = torch.empty(count, layers, piece, dtype=torch.uint8, device=pool.storage.device)
    for first in range(0, pool.num_layers, layers):
        part = aside.view(-1)[: count * min(layers, pool.num_layers - first) * piece].view(count, -1, piece)
        run_move(pool, pairs[:, 0], part, gather=True, first_layer=first)
        run_move(pool, pairs[:, 1], part, gather=False, first_layer=first)


def gather_blocks_ref(pool: KVPool, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Plain torch twin of `gather_blocks`."""
    buffer.copy_(pool.storage[:, block_ids].transpose(0, 1))


def scatter_blocks_ref(pool: KVPool, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Plain torch twin of `scatter_blocks`."""
    pool.storage[:, block_ids] = buffer.transpose(0, 1).to(pool.storage.device)


def copy_blocks_ref(pool: KVPool, pairs: torch.Tensor) -> None:
    """Plain torch twin of `copy_blocks`."""
    pool.storage[:, pairs[:, 1]] = pool.storage[:, pairs[:, 0]]


def _check(pool: KVPool, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raise ValueError with what is wrong."""
    device = pool.storage.device
    if block_ids.dim() != 1 or block_ids.dtype != torch.int64 or block_ids.device != device:
        got = f"{list(block_ids.shape)} {block_ids.dtype} on {block_ids.device}"
        raise ValueError(f"cache blocks: block_ids must be int64 [n] on {device}, got {got}")
    shape = (block_ids.shape[0], pool.num_layers, pool.layout.block_bytes)
    if buffer.shape != shape or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        got = f"{list(buffer.shape)} {buffer.dtype}"
        raise ValueError(f"cache blocks: the buffer must be contiguous uint8 {list(shape)}, got {got}")
    if device.type == "cuda" and buffer.device != device and not (buffer.is_cpu and buffer.is_pinned()):
        raise ValueError(f"cache blocks: the buffer must be on {device} or in pinned host memory, not {buffer.device}")


def run_move(
    pool: KVPool,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    *,
    gather: bool,
    first_layer: int = 0,
    programs: int | None = None,
    warps: int | None = None,
    chunk: int = CHUNK,
) -> None:
    """Launch the kernel for the layers from first_layer on that the buffer [n, layers, block_bytes] holds."""
    words = pool.layout.block_bytes // 4
    chunks = buffer.shape[0] * buffer.shape[1] * triton.cdiv(words, chunk)
    if not chunks:
        return
    usual = DEVICE if buffer.is_cuda else LINK
    move_kernel[(min(programs or usual[0], chunks),)](
        pool.storage.view(torch.int32),
        buffer.view(torch.int32),
        block_ids,
        chunks,
        words,
        buffer.shape[1],
        first_layer,
        pool.num_blocks * words,
        block_ids.stride(0),
        GATHER=gather,
        CHUNK=chunk,
        num_warps=warps or usual[1],
        num_stages=1,
    )

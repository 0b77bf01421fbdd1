"""Run with TRITON_INTERPRET=1: the cache write and the block moves on CPU tensors. Prints what failed."""

from __future__ import annotations

import sys

import torch
from kv_cache_cases import BF16, FLOAT, HALF, Case, disagreement

from qengine.kernels.paged_attn.blocks import run_move
from qengine.kernels.paged_attn.cache import BlockLayout, KVPool, LayerCache
from qengine.kernels.paged_attn.write import WriteLaunch, run_write

CASES = [
    (Case("float16", 64, (6, 2), rotary=64), WriteLaunch(2, 4, 4)),
    (Case("float16", 64, (3, 1), 9), WriteLaunch(4, 1, 4)),
    (Case("float16", 128, (2, 2), rotary=96, norm="rms", angles=HALF, weights=HALF), WriteLaunch(1, 2, 4)),
    (Case("float16", 96, (5, 1), rotary=32, norm="layer", block_size=8), WriteLaunch(2, 4, 4)),
    (Case("bfloat16", 112, (1, 1), rotary=112, dtype=BF16), WriteLaunch(2, 2, 4)),
    (Case("int8", 80, (4, 2), rotary=32, norm="rms", dtype=FLOAT), WriteLaunch(2, 2, 4)),
    (Case("int8", 64, (3, 3), 7, rotary=32, interleaved=True), WriteLaunch(4, 4, 4)),
    (Case("int8", 256, (2, 1), rotary=64), WriteLaunch(1, 1, 4)),
    (Case("int4", 64, (3, 1), rotary=64), WriteLaunch(2, 2, 4)),
    (Case("int4", 80, (2, 2), rotary=64, norm="layer", block_size=32), WriteLaunch(2, 2, 4)),
    (Case("int4", 128, (2, 1), rotary=64, interleaved=True, norm="rms", offsets=2), WriteLaunch(2, 1, 4)),
    (Case("int4", 192, (6, 2), offsets=2), WriteLaunch(1, 4, 4)),
    (Case("int4", 112, (2, 2), rotary=112, offsets=2), WriteLaunch(1, 2, 4)),
    (Case("fp8", 96, (2, 2), rotary=96), WriteLaunch(2, 2, 4)),
]


def write(launch: WriteLaunch):  # type: ignore[no-untyped-def]
    def run(qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, options: dict[str, object]) -> None:
        order = ("num_heads", "head_norm", "norm_kind", "norm_eps", "cos", "sin", "interleaved")
        run_write(launch, qkv, cache, slots, *(options[name] for name in order))  # type: ignore[arg-type]

    return run


def moved(gather: bool) -> bool:
    """Whether gather_blocks' and scatter_blocks' kernel moves the bytes that it should, and no others."""
    pool = KVPool.allocate(BlockLayout("int8", 1, 24, 8), 3, 6, "cpu")
    pool.storage.random_(0, 256)
    ids = torch.randperm(6)[:4]
    buffer = torch.randint(0, 256, (4, 2, pool.layout.block_bytes), dtype=torch.uint8)
    want_pool, want_buffer = pool.storage.clone(), buffer.clone()
    if gather:
        want_buffer.copy_(pool.storage[1:, ids].transpose(0, 1))
    else:
        want_pool[1:, ids] = buffer.transpose(0, 1)
    run_move(pool, ids, buffer, gather=gather, first_layer=1, programs=3, chunk=64)
    return torch.equal(pool.storage, want_pool) and torch.equal(buffer, want_buffer)


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    failed = 0
    for case, launch in CASES:
        # the interpreter cuts bfloat16 and fp8 off where a GPU rounds them
        wrong = disagreement(case, write(launch), coarse=case.kind == "fp8" or case.dtype == BF16)
        if wrong:
            failed += 1
            print(f"FAILED {case} {launch}: {wrong}")
    for gather in (True, False):
        if not moved(gather):
            failed += 1
            print(f"FAILED blocks, gather={gather}")
    print(f"{len(CASES) + 2 - failed} cases passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())

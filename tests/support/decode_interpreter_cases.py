"""Run with TRITON_INTERPRET=1: the decode kernel on CPU tensors, case by case. Prints what failed."""

from __future__ import annotations

import sys

import torch
from decode_cases import TOLERANCE, Case, error, make

from qengine.kernels.paged_attn.decode import score_factors, shape_of
from qengine.kernels.paged_attn.decode_kernel import paged_decode_kernel
from qengine.kernels.paged_attn.decode_launch import DecodeLaunch, part_floats

BF16 = torch.bfloat16
LENS = (37, 0, 100, 1)
# case, launch, programs for each sequence and KV head
CASES = [
    (Case(LENS, head_dim=64), DecodeLaunch(2, 16, 2, min_tiles=1, skip=True), 1),
    (Case(LENS, head_dim=64), DecodeLaunch(2, 16, 0, min_tiles=1), 3),
    (Case((0, 0), head_dim=64), DecodeLaunch(2, 16), 2),
    (Case((129, 5), head_dim=128, heads=7, kv_heads=1, block_size=32), DecodeLaunch(1, 16, min_tiles=1), 5),
    (Case(LENS, head_dim=80, heads=20, block_size=8), DecodeLaunch(2, 16, 0, min_tiles=1), 3),
    (Case((70, 3), head_dim=96, heads=1, kv_heads=1, window=20), DecodeLaunch(2, 16, 3, min_tiles=1, skip=True), 2),
    (Case((41,), head_dim=256, heads=2, kv_heads=1, softcap=5.0), DecodeLaunch(2, 16, 0, min_tiles=1), 2),
    (Case((41,), head_dim=192, heads=9, kv_heads=1), DecodeLaunch(1, 16, min_tiles=1), 2),
    (Case((19, 33), head_dim=16, heads=2, kv_heads=1), DecodeLaunch(1, 32, min_tiles=1), 2),
    (Case(LENS, "int8", 64), DecodeLaunch(2, 32, min_tiles=1, skip=True), 1),
    (Case((90, 17), "int8", 112, 36, 2, 64, softcap=5.0, window=20), DecodeLaunch(2, 16, 0, min_tiles=1), 2),
    (Case((50,), "int8", 128, 2, 1, 8), DecodeLaunch(1, 32, min_tiles=1), 2),
    (Case((540, 33), head_dim=16, heads=1, kv_heads=1), DecodeLaunch(1, 16, min_tiles=1), 20),
    (Case(LENS, "fp8", 64), DecodeLaunch(2, 16, min_tiles=1), 1),
    (Case((50,), "fp8", 128, 7, 1, 128), DecodeLaunch(2, 32, min_tiles=1), 2),
    (Case(LENS, "int4", 64), DecodeLaunch(2, 32, 3, min_tiles=1, skip=True), 1),
    (Case((50, 90), "int4", 80, 20, 2, 32), DecodeLaunch(2, 16, 0, min_tiles=1), 3),
    (Case((77,), "int4", 128, 7, 1, window=40), DecodeLaunch(1, 16, 1, min_tiles=1, skip=True), 2),
    (Case((77,), "int4", 256, 2, 1), DecodeLaunch(1, 16, min_tiles=2), 2),
    (Case(LENS, "int4", 64, offsets=2), DecodeLaunch(2, 32, 3, min_tiles=1, skip=True, ahead=True), 1),
    (Case((50, 90), "int4", 80, 20, 2, 32, offsets=2), DecodeLaunch(2, 16, 0, min_tiles=1), 3),
    (Case((77,), "int4", 112, 7, 1, 8, 5.0, 40, offsets=2), DecodeLaunch(1, 16, 1, min_tiles=1, skip=True), 2),
    (Case((41,), "int4", 192, 9, 1, dtype=BF16, offsets=2), DecodeLaunch(1, 16, min_tiles=2), 2),
    (Case(LENS, "bfloat16", 64, 7, 1, 8, dtype=BF16), DecodeLaunch(2, 16, min_tiles=1), 1),
    (Case((33,), "int8", 64, 2, 1, dtype=BF16), DecodeLaunch(2, 16, min_tiles=1), 2),
]


def attend(case: Case, launch: DecodeLaunch, splits: int, odd: int) -> float:
    """The largest relative error of a row; infinite where a lock was left taken or the padding written to.

    odd: programs less, so that shares end within heads.
    """
    step = make(case)
    shape = shape_of(step.q, step.cache)
    rows = len(case.lens)
    programs = max(1, rows * case.kv_heads * shape.passes * splits - odd)
    wide = torch.full((rows, case.heads + 1, case.head_dim), float("nan")).to(case.dtype)
    out = wide[:, : case.heads]
    parts = torch.full((programs * part_floats(shape),), float("nan"))
    stats = parts[2 * programs * shape.live * shape.padded :]
    locks = torch.zeros(2 * programs, dtype=torch.int32)
    cache = step.cache
    to_score, cap = score_factors(case.head_dim**-0.5, case.softcap, case.kind)
    paged_decode_kernel[(programs,)](
        step.q.view(torch.int32), cache.k.view(torch.int32), cache.v.view(torch.int32),
        parts if cache.k_scale is None else cache.k_scale,
        parts if cache.v_scale is None else cache.v_scale, step.tables, step.lens, out, parts, stats, locks, to_score,
        cap, rows, case.window or 0, step.q.stride(0) // 8, out.stride(0), step.tables.stride(0),
        cache.k.stride(0) * cache.k.element_size() // 16, launch.min_tiles,
        **shape.constants(launch, case.kv_heads), QBF=case.dtype == BF16, SB=4, HAS_CAP=case.softcap is not None,
        HAS_WINDOW=case.window is not None, ASM=False,
    )  # fmt: skip
    if locks.any() or not wide[:, case.heads :].isnan().all():
        return float("inf")
    return error(out, step.exact)


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    failed = 0
    for number, (case, launch, splits) in enumerate(CASES):
        value = attend(case, launch, splits, number % 4)
        # the interpreter cuts bfloat16 off where a GPU rounds it
        if not value < TOLERANCE[case.dtype] * (2 if case.dtype == BF16 else 1):
            failed += 1
            print(f"FAILED {case} {launch} {splits} splits: relative error {value:.2e}")
    print(f"{len(CASES) - failed} cases passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())

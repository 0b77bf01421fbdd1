"""Run with TRITON_INTERPRET=1: the GEMM and dequantize kernels on CPU tensors, case by case. Prints what failed."""

from __future__ import annotations

import sys

import torch
from packed_cases import TOLERANCE, Case, error, make

from qengine.kernels.w4a16 import dequantize_ref
from qengine.kernels.w4a16.dequant import dequantize_rows
from qengine.kernels.w4a16.gemm import w4a16_gemm
from qengine.kernels.w4a16.layout import W4A16Weight

BF16 = torch.bfloat16
# case, (bm, bn, split, whole tiles, prefetch, halves, scaled)
CASES = [
    (Case(64, 256, 1), (8, 64, 1, 0, 0, False, False)),
    (Case(48, 384, 3, group=128, bias=True), (8, 32, 2, 1, 1, False, False)),
    (Case(40, 1024, 9, group=256), (16, 32, 3, 1, 2, True, False)),
    (Case(40, 1024, 2, group=-1), (8, 32, 5, 0, 2, False, True)),
    (Case(72, 264, 5, group=32), (8, 64, 2, 0, 1, False, True)),
    (Case(24, 264, 2, group=16), (8, 32, 2, 0, 1, True, True)),
    (Case(24, 576, 17, group=64, bias=True), (32, 32, 1, 0, 0, True, True)),
    (Case(8, 8, 1, group=-1), (8, 16, 1, 0, 1, False, False)),
    (Case(64, 136, 4, bits=8, group=-1), (8, 64, 2, 0, 0, False, False)),
    (Case(40, 192, 2, bits=8, group=16), (8, 32, 2, 0, 1, True, True)),
    (Case(40, 192, 2, bits=8, group=32), (8, 32, 1, 0, 2, False, True)),
    (Case(32, 320, 2, bits=8, group=64, bias=True), (8, 32, 2, 0, 1, False, False)),
    (Case(32, 512, 2, bits=8, group=128), (8, 32, 2, 0, 0, True, True)),
    (Case(32, 512, 2, bits=8, group=256), (8, 32, 3, 0, 0, False, False)),
    (Case(64, 256, 3, group=32, act_order=True), (8, 64, 2, 0, 1, False, True)),
    (Case(32, 264, 3, bits=3, group=128, act_order=True), (8, 32, 3, 0, 1, False, False)),
    (Case(32, 128, 3, bits=2, group=64), (8, 32, 1, 0, 1, False, True)),
    (Case(32, 256, 2, bits=8, group=64, act_order=True, bias=True), (8, 32, 2, 0, 1, False, False)),
    (Case(32, 256, 2, dtype=BF16, bias=True), (8, 32, 2, 0, 1, False, False)),
    (Case(32, 256, 2, bits=8, group=32, dtype=BF16), (8, 32, 2, 0, 0, True, True)),
]


def product(case: Case, tile: tuple[int, int, int, int, int, bool, bool]) -> float:
    """The relative error of one case; infinite where y was not all written or a lock was left taken."""
    bm, bn, split, whole, prefetch, halves, scaled = tile
    x, weight, bias, exact = make(case)
    out = torch.full((case.m, case.n + 8), float("nan")).to(case.dtype)
    tiles = -(-case.m // bm) * -(-case.n // bn)
    whole = min(whole, tiles) if split > 1 else tiles
    part = torch.full((max(1, (tiles - whole) * split * bm * bn),), float("nan"))
    locks = torch.zeros(max(1, tiles - whole), dtype=torch.int32)
    w4a16_gemm[(whole + (tiles - whole) * split,)](
        x, x, weight.words, weight.scales_zeros, weight.words if weight.perm is None else weight.perm,
        x if bias is None else bias, out, part, locks, case.m, case.n // 8, case.k, weight.words.shape[1],
        x.stride(0), out.stride(0), split, whole, weight.multiplier, BITS=weight.bits, GROUP=weight.group_size,
        BM=bm, BN=bn, SPLIT=split > 1, PREFETCH=prefetch, SCALED=scaled, HALVES=halves,
        HAS_PERM=weight.perm is not None, HAS_BIAS=bias is not None,
        EVEN_K=weight.perm is None and weight.k == weight.k_padded, PDL=0, TMA=False, WGMMA=False, ASM=False,
    )  # fmt: skip
    if locks.any() or not out[:, case.n :].isnan().all():
        return float("inf")
    return error(out[:, : case.n], exact)


def unpacked(weight: W4A16Weight) -> bool:
    """Whether the dequantize kernel writes the reference's rows."""
    out = torch.full((weight.n, weight.k_padded), float("nan")).half()
    grid = (weight.words.shape[1], -(-weight.n // 32))
    dequantize_rows[grid](
        weight.words, weight.scales_zeros, out, 0, weight.n, weight.n, weight.words.shape[1], out.stride(0),
        weight.multiplier, BITS=weight.bits, GROUP=weight.group_size, BN=32, ASM=False,
    )  # fmt: skip
    return torch.equal(out[:, : weight.k], dequantize_ref(weight, torch.float16))


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    failed = 0
    for case, tile in CASES:
        value = product(case, tile)
        # the interpreter cuts bfloat16 off where a GPU rounds it
        if not value < TOLERANCE[case.dtype] * (2 if case.dtype == BF16 else 1):
            failed += 1
            print(f"FAILED {case} {tile}: relative error {value:.2e}")
    for case in (Case(40, 264, 1, group=16), Case(24, 192, 1, bits=8, group=64), Case(24, 256, 1)):
        if not unpacked(make(case)[1]):
            failed += 1
            print(f"FAILED dequantize {case}")
    print(f"{len(CASES) + 3 - failed} cases passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())

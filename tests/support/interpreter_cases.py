"""Run with TRITON_INTERPRET=1: the GEMM and dequantize kernels on CPU tensors, case by case. Prints what failed."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from packed_cases import TOLERANCE, Case, error, make

from qengine.kernels.fused.ref import act_and_mul
from qengine.kernels.launch import Launch
from qengine.kernels.w4a16 import dequantize_ref
from qengine.kernels.w4a16.dequant import dequantize_rows
from qengine.kernels.w4a16.gemm import w4a16_gemm
from qengine.kernels.w4a16.layout import W4A16Weight
from qengine.kernels.w4a16.parts import share_sums

BF16 = torch.bfloat16
CASES = [
    (Case(64, 256, 1), Launch(bm=8, bn=64)),
    (Case(48, 384, 3, group=128, bias=True), Launch(bm=8, bn=32, split=2, whole=1, prefetch=1)),
    (Case(40, 1024, 9, group=256), Launch(bm=16, bn=32, split=3, whole=1, prefetch=2, halves=True)),
    (Case(40, 1024, 2, group=-1), Launch(bm=8, bn=32, split=5, prefetch=2, scaled=True)),
    (Case(72, 264, 5, group=32), Launch(bm=8, bn=64, split=2, prefetch=1, scaled=True)),
    (Case(24, 264, 2, group=16), Launch(bm=8, bn=32, split=2, prefetch=1, halves=True, scaled=True)),
    (Case(24, 576, 17, group=64, bias=True), Launch(bm=32, bn=32, halves=True, scaled=True)),
    (Case(8, 8, 1, group=-1), Launch(bm=8, bn=16, prefetch=1)),
    (Case(64, 136, 4, bits=8, group=-1), Launch(bm=8, bn=64, split=2)),
    (Case(40, 192, 2, bits=8, group=16), Launch(bm=8, bn=32, split=2, prefetch=1, halves=True, scaled=True)),
    (Case(40, 192, 2, bits=8, group=32), Launch(bm=8, bn=32, prefetch=2, scaled=True)),
    (Case(32, 320, 2, bits=8, group=64, bias=True), Launch(bm=8, bn=32, split=2, prefetch=1)),
    (Case(32, 512, 2, bits=8, group=128), Launch(bm=8, bn=32, split=2, halves=True, scaled=True)),
    (Case(32, 512, 2, bits=8, group=256), Launch(bm=8, bn=32, split=3)),
    (Case(64, 256, 3, group=32, act_order=True), Launch(bm=8, bn=64, split=2, prefetch=1, scaled=True)),
    (Case(32, 264, 3, bits=3, group=128, act_order=True), Launch(bm=8, bn=32, split=3, prefetch=1)),
    (Case(32, 128, 3, bits=2, group=64), Launch(bm=8, bn=32, prefetch=1, scaled=True)),
    (Case(32, 256, 2, bits=8, group=64, act_order=True, bias=True), Launch(bm=8, bn=32, split=2, prefetch=1)),
    (Case(32, 256, 2, dtype=BF16, bias=True), Launch(bm=8, bn=32, split=2, prefetch=1)),
    (Case(32, 256, 2, bits=8, group=32, dtype=BF16), Launch(bm=8, bn=32, split=2, halves=True, scaled=True)),
    (Case(24, 1024, 35), Launch(bm=64, bn=16, split=3, prefetch=1, scaled=True)),
    (Case(40, 640, 9, bias=True), Launch(bm=16, bn=32, split=2, whole=1, scaled=True, overlap=True)),
    (Case(40, 192, 2, bits=8, group=32), Launch(bm=8, bn=32, split=3, scaled=True, overlap=True)),
]


GATED = [
    (Case(64, 256, 1), Launch(bm=8, bn=64), "silu"),
    (Case(48, 384, 3, bias=True), Launch(bm=8, bn=32, split=2, whole=1, prefetch=1), "gelu_tanh"),
    (Case(80, 1024, 9, group=256, bias=True), Launch(bm=16, bn=32, split=3, prefetch=2, halves=True), "silu"),
    (Case(48, 192, 17, bits=8, group=32), Launch(bm=32, bn=32, split=3, scaled=True, overlap=True), "relu"),
    (Case(32, 256, 2, group=64, act_order=True), Launch(bm=8, bn=32, scaled=True), "quick_gelu"),
]
NAMES = {"gelu_tanh": "gelu_pytorch_tanh"}


def multiply(case: Case, launch: Launch, act: str = "") -> tuple[torch.Tensor | None, torch.Tensor]:
    """(y, None where it was not all written or a lock was left taken; the exact product)."""
    bm, bn, split, whole = launch.bm, launch.bn, launch.split, launch.whole
    x, weight, bias, exact = make(case)
    columns = case.n // 2 if act else case.n
    out = torch.full((case.m, columns + 8), float("nan")).to(case.dtype)
    tiles = -(-case.m // bm) * -(-case.n // bn)
    whole = min(whole, tiles) if split > 1 else tiles
    part = torch.full((max(1, (tiles - whole) * split * bm * bn),), float("nan"))
    locks = torch.zeros(max(1, tiles - whole), dtype=torch.int32)
    w4a16_gemm[(whole + (tiles - whole) * split,)](
        x, x, weight.words, weight.scales_zeros, weight.words if weight.perm is None else weight.perm,
        x if bias is None else bias, out, part, locks, case.m, case.n // 8, case.k, weight.words.shape[1],
        x.stride(0), out.stride(0), split, whole, weight.multiplier, BITS=weight.bits, GROUP=weight.group_size,
        BM=bm, BN=bn, SPLIT=split > 1, PREFETCH=launch.prefetch, SCALED=launch.scaled,
        HALVES=launch.halves, OVERLAP=launch.overlap, SPREAD=False, ACT=act,
        HAS_PERM=weight.perm is not None, HAS_BIAS=bias is not None,
        EVEN_K=weight.perm is None and weight.k == weight.k_padded, PDL=0, TMA=False, WGMMA=False, ASM=False,
    )  # fmt: skip
    if locks.any() or not out[:, columns:].isnan().all():
        return None, exact
    return out[:, :columns], exact


def product(case: Case, launch: Launch) -> float:
    """The relative error of one case; infinite where `multiply` has no y."""
    got, exact = multiply(case, launch)
    return float("inf") if got is None else error(got, exact)


def gated(case: Case, launch: Launch, act: str) -> float:
    """As `product`, for act(gate) * up in the kernel."""
    got, exact = multiply(case, launch, act)
    gate, up = exact.view(case.m, -1, 2, 8).unbind(2)
    exact = act_and_mul(gate.flatten(1), up.flatten(1), NAMES.get(act, act))
    return float("inf") if got is None else error(got, exact)


def unpacked(weight: W4A16Weight) -> bool:
    """Whether the dequantize kernel writes the reference's rows."""
    out = torch.full((weight.n, weight.k_padded), float("nan")).half()
    grid = (weight.words.shape[1], -(-weight.n // 32))
    dequantize_rows[grid](
        weight.words, weight.scales_zeros, out, 0, weight.n, weight.n, weight.words.shape[1], out.stride(0),
        weight.multiplier, BITS=weight.bits, GROUP=weight.group_size, BN=32, ASM=False,
    )  # fmt: skip
    return torch.equal(out[:, : weight.k], dequantize_ref(weight, torch.float16))


@triton.jit
def share(parts, locks, y, bias, M, N, sy, splits, tiles_m, BM: tl.constexpr, BN: tl.constexpr):
    """What a program of a tile in parts does once all parts are there."""
    tile = tl.program_id(0) // splits
    ps = tl.program_id(0) % splits
    mine = parts + tile * splits * (BN * BM)
    share_sums(
        mine, locks + tile, splits, ps, y, sy, 2.0, bias, tile // tiles_m, tile % tiles_m, M, N, BM, BN, True, "", False
    )


def shared(splits: int, m: int = 100, n: int = 56, bm: int = 64, bn: int = 32) -> bool:
    """Whether programs that share a tile's sum write all of y, once, and clear the locks."""
    tiles_m, tiles_n = -(-m // bm), -(-n // bn)
    exact = torch.randn(tiles_m * tiles_n, splits, bn, bm)
    # the order of to_flat: rows (n, h, g), columns (j, t, e) -> (j, n, g, t, h, e)
    order = exact.view(-1, splits, bn // 16, 2, 8, bm // 8, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7)
    parts, locks = order.contiguous(), torch.full((tiles_m * tiles_n,), splits, dtype=torch.int32)
    y, bias = torch.full((m, n + 8), float("nan")), torch.randn(n)
    share[(tiles_m * tiles_n * splits,)](parts, locks, y, bias, m, n, y.stride(0), splits, tiles_m, BM=bm, BN=bn)
    whole = exact.sum(1).view(tiles_n, tiles_m, bn, bm).permute(1, 3, 0, 2).reshape(tiles_m * bm, tiles_n * bn)
    expected = 2 * whole[:m, :n] + bias
    return torch.allclose(y[:, :n], expected, atol=1e-4) and bool(y[:, n:].isnan().all()) and not locks.any()


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    failed = 0
    for case, launch in CASES:
        value = product(case, launch)
        # the interpreter cuts bfloat16 off where a GPU rounds it
        if not value < TOLERANCE[case.dtype] * (2 if case.dtype == BF16 else 1):
            failed += 1
            print(f"FAILED {case} {launch}: relative error {value:.2e}")
    for case, launch, act in GATED:
        value = gated(case, launch, act)
        if not value < 2 * TOLERANCE[case.dtype]:
            failed += 1
            print(f"FAILED {act} {case} {launch}: relative error {value:.2e}")
    for case in (Case(40, 264, 1, group=16), Case(24, 192, 1, bits=8, group=64), Case(24, 256, 1)):
        if not unpacked(make(case)[1]):
            failed += 1
            print(f"FAILED dequantize {case}")
    for splits in (2, 3, 9):
        if not shared(splits):
            failed += 1
            print(f"FAILED share_sums of {splits} parts")
    print(f"{len(CASES) + len(GATED) + 6 - failed} cases passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())

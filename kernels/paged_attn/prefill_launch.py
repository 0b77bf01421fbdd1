"""Which kernel, with which launch parameters, attends a step's prompt chunks: one pure function, `pick_prefill`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

from .cache import Kind


@dataclass(frozen=True)
class PrefillLaunch:
    """How a chunk's attention is computed.

    bm: rows of a tile, each a token and query head. pack: query heads of one KV head side by side in a tile, so that a
    tile holds bm // pack tokens. bn: keys a turn. warps, stages: of each program. split, prefetch, sums: see
    paged_prefill_kernel. whole: a head is one part, padded to a power of two, where it would be two. hopper: the kernel
    of prefill_hopper.py (compute capability 9.0, 16-bit caches, bm 128; warps, split, prefetch, whole and sums say
    nothing).
    """

    bm: int = 128
    bn: int = 64
    pack: int = 1
    warps: int = 8
    stages: int = 1
    split: bool = True
    prefetch: bool = False
    whole: bool = False
    sums: bool = False
    hopper: bool = False

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return self.bm // self.pack


def parts(head_dim: int, kind: str, padded: bool = False) -> tuple[int, int]:
    """(D1, D2): the powers of two in which a head is taken, see prefill_kernel.py. Kinds as the kernel names them."""
    if kind == "int4":
        half = max(16, triton.next_power_of_2(head_dim // 2))
        return half, half
    whole = max(16, triton.next_power_of_2(head_dim))
    if padded or whole <= head_dim or whole <= 32:
        return whole, 0
    second = max(16, triton.next_power_of_2(head_dim - whole // 2))
    return (whole, 0) if whole // 2 + second >= whole else (whole // 2, second)


def kernel_kind(kind: str) -> str:
    """The kernel's name of a cache's kind: float16 and bfloat16 are both "float"."""
    return "float" if kind in ("float16", "bfloat16") else kind


def packing(group: int, bm: int, max_query_len: int) -> int:
    """Query heads to put into a tile of bm rows: all of a KV head's, or a part where that would waste rows."""
    if group * max_query_len <= bm:
        return min(group, bm)
    fits = [p for p in range(1, min(group, bm) + 1) if group % p == 0]
    whole = [p for p in fits if bm // p * p >= 0.95 * bm]
    return max(whole)


def head_chunk(groups: int, tiles: int, count: int) -> int:
    """Head groups whose tiles are computed together on a card of `count` multiprocessors; see prefill_load.place_of.

    The fewest that keep it busy to the end, of which there are a whole number in all `groups`.
    """
    return next((n for n in range(1, groups + 1) if groups % n == 0 and n * tiles >= 2 * count), groups)


def pick_prefill(sm: int, head_dim: int, kind: Kind, group: int, max_query_len: int) -> PrefillLaunch:
    """The launch for heads of head_dim elements, `group` query heads a KV head, on compute capability `sm`. Pure.

    The tiles are the fastest of those measured on an H200, natively and with its code generated for 7.5, that leave no
    register on the stack.
    """
    quantized = kernel_kind(kind) != "float"
    rows = max_query_len * group
    if sm == 90 and not quantized and rows > 64 and hopper_size(head_dim) <= 256:
        launch = PrefillLaunch(bm=128, bn=128 if head_dim <= 128 else 64, stages=2, hopper=True)
        pack = packing(group, 128, max_query_len)
        # a tile of one head is a little faster, unless it is far from full
        alone, together = -(-max_query_len // 128), -(-max_query_len // (128 // pack)) / pack
        return replace(launch, pack=1 if alone <= 1.05 * together else pack)
    if sm >= 80:
        launch = _wide(head_dim) if sm == 90 else _narrow(head_dim, quantized)
        least = 16
    else:
        launch = _turing(head_dim, kind, rows)
        # smaller tiles of quantized values are given so few registers by the assembler that it uses the stack
        least = (64 if head_dim > 128 else 32) if quantized else 16
    while launch.bm > least and launch.bm // 2 >= rows:
        bm = launch.bm // 2
        launch = replace(
            launch, bm=bm, warps=max(1, bm * launch.warps // launch.bm) if sm >= 80 else 8 if bm > 32 else 4
        )
    if sm < 80 and launch.bm == 64 and 64 < head_dim <= 128 and kind != "int4":
        # eight warps would share rows, see `sums`; 4-bit values would not fit in the registers of four
        launch = replace(launch, warps=4, sums=True)
    if sm < 80 and launch.bm == 16 and parts(head_dim, kernel_kind(kind), launch.whole) == (64, 16):
        # 64 keys would take more registers than there are
        launch = replace(launch, bn=32)
    # few warps hold many registers of a tile that is loaded ahead
    ahead = launch.prefetch and launch.bm > 32
    return replace(launch, prefetch=ahead, pack=packing(group, launch.bm, max_query_len))


def _turing(head_dim: int, kind: Kind, rows: int) -> PrefillLaunch:
    if head_dim > 128:
        return _turing_wide(head_dim, kernel_kind(kind), rows)
    ahead = kind == "int4" or (kind != "int8" and head_dim < 112)
    return PrefillLaunch(bm=128, bn=64, warps=8, prefetch=ahead)


def _turing_wide(head_dim: int, kind: str, rows: int) -> PrefillLaunch:
    if kind == "float" and rows <= 32:
        # few rows: what counts is how many loads are under way
        return PrefillLaunch(bm=64, bn=32, warps=8, whole=True)
    padded = sum(parts(head_dim, kind)) == 256
    if kind == "float" and not padded:
        return PrefillLaunch(bm=64, bn=32, warps=4)
    # 32 keys a turn would not fit in registers; nor would int8 values of a padded head that are loaded ahead
    return PrefillLaunch(bm=64, bn=16, warps=4, sums=True, prefetch=kind != "int8" or not padded)


def _narrow(head_dim: int, quantized: bool) -> PrefillLaunch:
    if head_dim > 128:
        return PrefillLaunch(bm=64, bn=32, warps=8, stages=1 if quantized else 2, whole=True)
    return PrefillLaunch(bm=128, bn=64, warps=8, stages=2)


def _wide(head_dim: int) -> PrefillLaunch:
    return PrefillLaunch(bm=128, bn=64 if head_dim > 128 else 128, warps=8, stages=2)


def hopper_size(head_dim: int) -> int:
    """A head padded to what the kernel of prefill_hopper.py takes: 64, 128 or 256 elements."""
    return max(64, triton.next_power_of_2(head_dim))

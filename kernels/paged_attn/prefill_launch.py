"""Which kernel, with which launch parameters, attends a step's prompt chunks: one pure function, `pick_prefill`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

from .cache import Kind


@dataclass(frozen=True)
class PrefillLaunch:
    """How a chunk's attention is computed.

    bm: rows of a tile, each a token and query head. pack: query heads of one KV head side by side in a tile, so that a
    tile holds bm // pack tokens. bn: keys a turn. warps, stages: of each program. split, prefetch: see
    paged_prefill_kernel. whole: a head is one part, padded to a power of two, where it would be two. hopper: the kernel
    of prefill_hopper.py (compute capability 9.0, 16-bit caches, bm 128; warps, split, prefetch and whole say nothing).
    """

    bm: int = 128
    bn: int = 64
    pack: int = 1
    warps: int = 8
    stages: int = 1
    split: bool = True
    prefetch: bool = False
    whole: bool = False
    hopper: bool = False
    persistent: bool = False

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
    """The launch for heads of head_dim elements, `group` query heads a KV head, on compute capability `sm`. Pure."""
    quantized = kernel_kind(kind) != "float"
    rows = max_query_len * group
    if sm == 90 and not quantized and rows > 64 and hopper_size(head_dim) <= 256:
        launch = PrefillLaunch(bm=128, bn=128 if head_dim <= 128 else 64, stages=2, hopper=True)
        pack = packing(group, 128, max_query_len)
        # a tile of one head is a little faster, unless it is far from full
        alone, together = -(-max_query_len // 128), -(-max_query_len // (128 // pack)) / pack
        return replace(launch, pack=1 if alone <= 1.05 * together else pack)
    launch = _wide(head_dim, quantized) if sm == 90 else _narrow(sm, head_dim, quantized)
    wide = max(1, launch.bm // launch.warps)
    while launch.bm > 16 and launch.bm // 2 >= rows:
        launch = replace(launch, bm=launch.bm // 2, warps=max(1, launch.bm // 2 // wide))
    return replace(launch, pack=packing(group, launch.bm, max_query_len))


def _narrow(sm: int, head_dim: int, quantized: bool) -> PrefillLaunch:
    # the largest tiles that leave no register on the stack
    copies = 2 if sm >= 80 else 1
    if head_dim > 128:
        return PrefillLaunch(bm=64, bn=32, warps=8, stages=1 if quantized else copies, whole=True)
    return PrefillLaunch(bm=128, bn=32 if sm < 80 and 64 < head_dim < 112 else 64, warps=8, stages=copies)


def _wide(head_dim: int, quantized: bool) -> PrefillLaunch:
    return PrefillLaunch(bm=128, bn=64 if quantized or head_dim > 128 else 128, warps=8, stages=2)


def hopper_size(head_dim: int) -> int:
    """A head padded to what the kernel of prefill_hopper.py takes: 64, 128 or 256 elements."""
    return max(64, triton.next_power_of_2(head_dim))

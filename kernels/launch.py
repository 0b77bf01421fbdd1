"""Which kernel, with which launch parameters, serves a linear layer: one pure function, `pick`.

It reads a table that `qengine tune` wrote for this very kind of card, then the shipped one of the same compute
capability (`launch_tables/sm*.json`: measured for 9.0, from the cost model for the others), and falls back to a rule
where both say nothing. Nothing here asks for a device.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "launch_tables"
SM_COUNT = {75: 40, 80: 108, 86: 84, 89: 128, 90: 132}
SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448}
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Rows of x that every table has launches for."""
FINER = (48, 96, 160, 384, 640, 768)
"""Rows between these that a table may have launches for: tiles that fill the card at 1024 rows may leave it at 768."""


@dataclass(frozen=True)
class Launch:
    """How one product is computed.

    kernel: "gemm" (fused), or "dequantize" (weights to fp16 a slice at a time, each multiplied by cuBLAS).
    bm, bn: tile of y, tokens by outputs. split: parts of K summed in order. whole: tiles computed in one part all
    the same, so that only the last, incomplete round of programs is split. warps, stages: of each program.
    prefetch, scaled, halves, pdl, tma, overlap, spread: see w4a16_gemm.
    """

    kernel: str = "gemm"
    bm: int = 16
    bn: int = 64
    split: int = 1
    whole: int = 0
    warps: int = 4
    stages: int = 1
    prefetch: int = 0
    scaled: bool = False
    halves: bool = False
    pdl: int = 0
    tma: bool = False
    overlap: bool = False
    spread: bool = False


def bucket(m: int) -> int:
    """The smallest of BUCKETS and FINER that holds m rows, or the last."""
    return min((b for b in (*BUCKETS, *FINER) if m <= b), default=BUCKETS[-1])


def pick(m: int, n: int, k: int, group: int, sm: int, smem: int, bits: int = 4, sm_count: int | None = None) -> Launch:
    """The launch for x [m, k] by W [n, k] in groups of `group` columns (0: one group) on compute capability `sm`.

    smem: bytes of shared memory a program may use. bits: 4 or 8 as packed. sm_count: multiprocessors, or None for the
    capability's usual card. Pure: the same arguments give the same launch as long as the tables do not change.
    """
    return _pick(m, n, k, group, sm, smem, bits, sm_count or SM_COUNT.get(sm, 108))


@functools.lru_cache(16384)
def _pick(m: int, n: int, k: int, group: int, sm: int, smem: int, bits: int, count: int) -> Launch:
    row = _from_table(min(m, BUCKETS[-1]), n, k, group, sm, bits, count)
    launch = Launch(**row["launch"]) if row else _rule(m, sm)
    if launch.kernel == "gemm":
        # a split fills one card's multiprocessors with one shape's tiles: for others it is computed anew
        same = row is not None and (row["n"], row["k"], row["count"]) == (n, k, count)
        launch = _fit(launch, n, k, m, group, bits, sm, smem, count, keep_split=same)
    return launch


def shared_bytes(launch: Launch, bits: int) -> int:
    """Upper estimate of the shared memory a launch takes: copies in flight, or the tile on its way out."""
    block = 512 // bits
    words = launch.stages > 1 and not launch.overlap
    stage = launch.bm * block * 2 + (launch.bn * 64 + launch.bn * 16 if words else 0)
    return max(stage * max(launch.stages, 1) + 2048, launch.bm * launch.bn * 4 + 1024)


def split_for(m: int, n: int, k: int, bm: int, bn: int, block: int, slots: int) -> int:
    """Parts of K that best fill `slots` programs: whole rounds of programs, the fewest parts that come near it."""
    tiles = math.ceil(m / bm) * math.ceil(n / bn)
    blocks = math.ceil(k / block)
    best, best_cost = 1, math.inf
    for split in range(1, min(blocks, 32) + 1):
        per = math.ceil(blocks / split)
        # a part costs its blocks, a start of about 3 and, beyond the first, a share of the sum
        cost = math.ceil(tiles * split / slots) * (per + 3) + 0.25 * (split - 1)
        if cost < best_cost - 1e-9:
            best, best_cost = split, cost
    return best


def _rule(m: int, sm: int) -> Launch:
    copies = sm >= 80
    if m <= 16:
        bm = 8 if m <= 8 else 16
        return Launch(bm=bm, bn=64, stages=4) if copies else Launch(bm=bm, bn=128, prefetch=1)
    if m <= 32:
        return Launch(bm=32, bn=64 if copies else 128, stages=3 if copies else 1, halves=sm != 90)
    if sm != 90:
        if copies and m > 1024:
            return Launch("dequantize")
        return Launch(bm=64, bn=128, stages=2 if copies else 1, scaled=True, halves=True)
    if m > 2048:
        return Launch("dequantize")
    hopper = Launch(bm=64, bn=64, stages=3, scaled=True, pdl=2, tma=True, spread=True)
    if m <= 128:
        return replace(hopper, bm=64 if m <= 64 else 128)
    return replace(hopper, bm=256, bn=128, warps=8, overlap=True)


def _fit(
    launch: Launch, n: int, k: int, m: int, group: int, bits: int, sm: int, smem: int, count: int, keep_split: bool
) -> Launch:
    # what a table or rule says, within what this shape and card allow
    values = asdict(launch)
    block = 512 // bits
    if 0 < group < block:
        values["scaled"] = True
    if sm < 80:
        values["stages"] = 1
    values["pdl"] = values["pdl"] if sm == 90 else 0
    values["tma"] = values["tma"] and sm == 90
    values["spread"] = values["spread"] and values["bm"] >= 64
    values["overlap"] = values["overlap"] and sm == 90 and values["scaled"] and not values["halves"]
    values["stages"] = _shallow(Launch(**values), bits, smem).stages
    if not keep_split:
        large = values["bm"] * values["bn"] > 8192
        residents = min(8, 16 // values["warps"]) if values["bm"] <= 16 else 1 if large else 2
        values["split"] = split_for(m, n, k, values["bm"], values["bn"], block, count * residents)
        values["whole"] = 0
    values["split"] = max(1, min(values["split"], math.ceil(k / block)))
    return Launch(**values)


def _shallow(launch: Launch, bits: int, smem: int) -> Launch:
    # as many stages as the shared memory holds
    while launch.stages > 1 and shared_bytes(launch, bits) > smem:
        launch = replace(launch, stages=launch.stages - 1)
    return launch


def user_table(sm: int, count: int) -> Path:
    """Where `qengine tune` writes the table of a card with `count` multiprocessors, and `pick` looks first."""
    root = os.environ.get("QENGINE_CACHE")
    folder = Path(root) / "launch" if root else Path.home() / ".cache" / "qengine" / "launch"
    return folder / f"sm{sm}x{count}.json"


@functools.lru_cache
def load_table(sm: int, count: int) -> tuple[dict[str, Any], ...]:
    """Rows for a card, the user's own and the shipped: {m, n, k, bits, group, count, shipped, launch: {...}}.

    count: multiprocessors of the card that the row is for. shipped: whether the row is not the user's.
    """
    rows: list[dict[str, Any]] = []
    for shipped, path in enumerate((user_table(sm, count), TABLES / f"sm{sm}.json")):
        if path.is_file():
            table = json.loads(path.read_text())
            more = {"count": table.get("count", SM_COUNT.get(sm)), "shipped": bool(shipped)}
            rows += [{**row, **more} for row in table["rows"]]
    return tuple(rows)


def forget_tables() -> None:
    """Read the tables anew at the next pick: after one was written."""
    load_table.cache_clear()
    _pick.cache_clear()


def _from_table(m: int, n: int, k: int, group: int, sm: int, bits: int, count: int) -> dict[str, Any] | None:
    # groups of a block and more run the same loop; smaller ones have rows of their own
    block = 512 // bits
    fine = group if 0 < group < block else 0
    most = next(b for b in BUCKETS if m <= b)
    best: dict[str, Any] | None = None
    best_key: tuple[float, bool, int] = (0.5, False, 0)
    for row in load_table(sm, count):
        row_fine = row["group"] if 0 < row["group"] < block else 0
        if not m <= row["m"] <= most or (row["bits"], row_fine) != (bits, fine):
            continue
        # the nearest shape; of its rows the user's own, and of these the one for the fewest rows that are enough
        key = (abs(math.log(row["n"] / n)) + abs(math.log(row["k"] / k)), row["shipped"], row["m"])
        if key < best_key:
            best, best_key = row, key
    return best

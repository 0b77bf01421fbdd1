"""Random paged caches, queries and exact results, for the tests of the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool, LayerCache, store_kv_ref
from qengine.kernels.paged_attn.decode import paged_decode_ref


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    kind: Kind = "float16"
    head_dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16
    softcap: float | None = None
    window: int | None = None
    dtype: torch.dtype = torch.float16
    offsets: int = 1

    def __str__(self) -> str:
        lens = "x".join(map(str, self.lens)) if len(self.lens) < 6 else f"{len(self.lens)}rows"
        extra = (f"-cap{self.softcap}" if self.softcap else "") + (f"-win{self.window}" if self.window else "")
        name = f"{self.kind}-d{self.head_dim}-{self.heads}of{self.kv_heads}-b{self.block_size}-{lens}{extra}"
        return name + f"-{str(self.dtype)[6:]}" + ("-two" if self.offsets == 2 else "")

    @property
    def options(self) -> dict:
        return {"scale": self.head_dim**-0.5, "softcap": self.softcap, "sliding_window": self.window}


@dataclass(frozen=True)
class Step:
    q: torch.Tensor
    cache: LayerCache
    tables: torch.Tensor
    lens: torch.Tensor
    exact: torch.Tensor


def poison(pool: KVPool) -> LayerCache:
    """The pool's last layer, with NaN wherever a place can hold one, and codes of all kinds elsewhere."""
    pool.storage.random_(0, 256)
    cache = pool.layer(pool.num_layers - 1)
    for part in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if part is not None and part.dtype in (torch.float16, torch.bfloat16):
            part.fill_(float("nan"))
    return cache


def make(case: Case, device: str = "cpu", spread: float = 1.0) -> Step:
    """A step on a poisoned cache with shuffled blocks: places that are no sequence's are NaN or random codes."""
    rows = len(case.lens)
    counts = [-(-max(n, 0) // case.block_size) for n in case.lens]
    layout = BlockLayout(case.kind, case.kv_heads, case.head_dim, case.block_size, case.offsets)
    cache = poison(KVPool.allocate(layout, 2, sum(counts) + 3, device, rotate=False))
    ids = torch.randperm(sum(counts) + 3)
    tables = torch.zeros(rows, max(max(counts), 1) + 1, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[start : start + count].int()
        start += count
    for row, length in enumerate(case.lens):
        if length > 0:
            place = torch.arange(length)
            slots = tables[row].long()[place // case.block_size] * case.block_size + place % case.block_size
            k, v = (torch.randn(length, case.kv_heads, case.head_dim).to(case.dtype) for _ in range(2))
            store_kv_ref(k.to(device) * spread, v.to(device), cache, slots.to(device))
    # a row of the model's joined q, k, v: queries are not contiguous
    wide = torch.randn(rows, (case.heads + 2 * case.kv_heads) * case.head_dim).to(case.dtype).to(device)
    q = wide[:, : case.heads * case.head_dim].unflatten(1, (case.heads, case.head_dim))
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    tables = tables.to(device)
    return Step(q, cache, tables, lens, paged_decode_ref(q, cache, tables, lens, **case.options))


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error of a row in the 2-norm (rows of zeros: absolute); NaN counts as infinite."""
    difference = (got.float() - exact).flatten(1).norm(dim=1)
    size = exact.flatten(1).norm(dim=1)
    value = float((difference / torch.where(size > 0, size, 1.0)).max())
    return value if value == value else float("inf")


TOLERANCE = {torch.float16: 4.5e-4, torch.bfloat16: 4e-3}
"""For the worst of many rows; on the whole it is two roundings of 11 bits (8 for bfloat16), of probabilities and of the
result."""

"""Random chunks of prompts over a paged cache full of garbage, for the tests of the prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool, LayerCache, store_kv_ref
from qengine.kernels.paged_attn.prefill import paged_prefill_ref


@dataclass(frozen=True)
class Case:
    """lens: (new tokens, cached ones) of each sequence. before: rows of q in front of the first sequence's."""

    kind: Kind = "float16"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    lens: tuple[tuple[int, int], ...] = ((5, 9), (20, 0))
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float16
    before: int = 3
    spread: float = 1.0
    offsets: int = 1

    def __str__(self) -> str:
        extra = f"-w{self.window}" if self.window else ""
        extra += f"-cap{self.softcap}" if self.softcap else ""
        extra += "-two" if self.offsets == 2 else ""
        lens = ",".join(f"{n}+{c}" for n, c in self.lens)
        shape = f"{self.heads}/{self.kv_heads}x{self.head_dim}-bs{self.block_size}"
        return f"{self.kind}-{shape}-{lens}{extra}-{str(self.dtype)[6:]}"


@dataclass(frozen=True)
class Step:
    """What a case's call takes. q is a view of wider rows, and so is out, whose every element was poisoned."""

    q: torch.Tensor
    cache: LayerCache
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    wide_out: torch.Tensor
    out: torch.Tensor
    options: dict


def make(case: Case, device: str = "cpu") -> Step:
    """Fresh random keys, values and queries; blocks in random order, everything else in the cache is garbage."""
    layout = BlockLayout(case.kind, case.kv_heads, case.head_dim, case.block_size, case.offsets)
    needed = [-(-(n + c) // case.block_size) for n, c in case.lens]
    blocks = sum(needed) + 3
    pool = KVPool.allocate(layout, 2, blocks, "cpu")
    # all bit patterns, NaN and infinity among them: what is read by mistake shows
    pool.storage.random_(0, 256)
    cache = pool.layer(1)
    order = torch.randperm(blocks, dtype=torch.int32)
    tables = torch.zeros(len(case.lens), max(1, *needed), dtype=torch.int32)
    at = 0
    for row, ((new, context), count) in enumerate(zip(case.lens, needed, strict=True)):
        tables[row, :count] = order[at : at + count]
        at += count
        place = torch.arange(new + context)
        slots = tables[row].long()[place // case.block_size] * case.block_size + place % case.block_size
        k = torch.randn(new + context, case.kv_heads, case.head_dim) * case.spread
        store_kv_ref(k, torch.randn(k.shape), cache, slots)
    starts = [case.before]
    for new, _ in case.lens:
        starts.append(starts[-1] + new)
    moved = KVPool(pool.storage.to(device), layout, pool.rotate).layer(1)
    q = torch.randn(starts[-1] + 2, case.heads + 1, case.head_dim).to(case.dtype).to(device)
    wide = torch.full((starts[-1] + 2, case.heads + 2, case.head_dim), float("nan"), dtype=case.dtype, device=device)
    return Step(
        q[:, : case.heads],
        moved,
        tables.to(device),
        torch.tensor([n + c for n, c in case.lens], dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        wide,
        wide[:, : case.heads],
        {"scale": case.head_dim**-0.5, "softcap": case.softcap, "sliding_window": case.window},
    )


def error(step: Step, case: Case) -> float:
    """Relative error of all rows, 2-norm; infinite for NaN or where other rows were written.

    A sequence's own error counts two thirds: that of a few numbers is far from the mean now and then.
    """
    start, stop = case.before, case.before + sum(n for n, _ in case.lens)
    untouched = step.wide_out[:start], step.wide_out[stop:], step.wide_out[:, case.heads :]
    if not all(bool(x.isnan().all()) for x in untouched):
        return float("inf")
    exact = torch.zeros(step.q.shape, dtype=torch.float32, device=step.q.device)
    tables = step.block_tables, step.seq_lens, step.query_starts
    paged_prefill_ref(step.q, step.cache, *tables, exact, **step.options)
    # the error of a row or two, as of one sequence among others, may be half as large again as that of many
    share = 1 if stop - start >= 16 else 2 / 3
    worst, row = _relative(step.out[start:stop].float(), exact[start:stop]) * share, start
    for new, _ in case.lens:
        if new:
            worst = max(worst, _relative(step.out[row : row + new].float(), exact[row : row + new]) * 2 / 3)
        row += new
    return worst


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    value = float((got - want).norm() / want.norm())
    return value if value == value else float("inf")


TOLERANCE: dict[tuple[str, torch.dtype], float] = {
    ("float16", torch.float16): 3e-4,
    ("int8", torch.float16): 6e-4,
    ("fp8", torch.float16): 6e-4,
    ("int4", torch.float16): 6e-4,
    ("bfloat16", torch.bfloat16): 4e-3,
    ("int8", torch.bfloat16): 5e-3,
    ("int4", torch.bfloat16): 5e-3,
    ("fp8", torch.bfloat16): 5e-3,
}
"""(kind, dtype of q) -> relative error. Quantized values are rounded once more, to q's dtype, than the reference's."""

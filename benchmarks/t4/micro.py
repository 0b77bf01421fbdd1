"""Times of the kernels that a step is made of, beside the cost model's, and the speeds that it starts from."""

from __future__ import annotations

from collections.abc import Callable

import torch

SHAPES = {
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}


def _known_card():
    from qengine.plan.cards import this_card

    found = this_card()
    return None if found is None else found.card


def _timed(call: Callable[[], None], repeats: int = 9) -> float:
    """Milliseconds of a call, the median, from CUDA events; one call before warms it up."""
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[repeats // 2]


def links() -> dict:
    """GB/s of a copy on the card (bytes read and written), and from and to pinned memory."""
    free = torch.cuda.mem_get_info()[0]
    size = min(1 << 30, free // 4)
    a = torch.empty(size, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    host = torch.empty(min(size, 256 << 20), dtype=torch.uint8, pin_memory=True)
    part = b[: host.numel()]
    rates = {
        "copy_gb_per_s": 2 * size / _timed(lambda: b.copy_(a)) / 1e6,
        "from_host_gb_per_s": host.numel() / _timed(lambda: part.copy_(host, non_blocking=True)) / 1e6,
        "to_host_gb_per_s": host.numel() / _timed(lambda: host.copy_(part, non_blocking=True)) / 1e6,
    }
    card = _known_card()
    if card is not None:
        rates |= {"assumed_copy_gb_per_s": card.peak * card.reach, "assumed_link_gb_per_s": card.link}
    return rates


def gemm(*, quick: bool) -> dict:
    """Microseconds of each linear of a layer at several row counts. predicted: the cost model's, where it can say."""
    from qengine.kernels.w4a16.tuning import random_weight, weight_sets

    card, rows, notes = _known_card(), [], set()
    models = list(SHAPES.items())[:1] if quick else list(SHAPES.items())
    for model, shapes in models:
        for n, k in shapes:
            first = random_weight(n, k, 4, 128)
            weights = [first] + [random_weight(n, k, 4, 128) for _ in range(weight_sets(first.nbytes(), 64 << 20) - 1)]
            for m in (1, 16, 512) if quick else (1, 4, 16, 32, 64, 256, 512, 2048):
                time = _product(m, weights[: 3 if m > 256 else None])
                row = {"model": model, "n": n, "k": k, "m": m, "us": time}
                row["gb_per_s"] = first.nbytes() / time / 1e3
                row["tflop_per_s"] = 2 * m * n * k / time / 1e6
                row["predicted_us"] = _predicted(card, m, n, k, notes)
                rows.append(row)
            del weights
    return {"rows": rows, "notes": sorted(notes)}


def _product(m: int, weights: list) -> float:
    """Microseconds of one product, in a CUDA graph over all the weights."""
    from qengine.kernels.w4a16.ops import choose, run
    from qengine.kernels.w4a16.tuning import time_graph

    first = weights[0]
    x = torch.randn(m, first.k, device="cuda", dtype=torch.float16)
    out = torch.empty(m, first.n, device="cuda", dtype=torch.float16)
    launch = choose(m, first, x.device)
    return time_graph([lambda weight=weight: run(x, weight, None, out, launch) for weight in weights])


def _predicted(card, m: int, n: int, k: int, notes: set[str]) -> float | None:
    from qengine.kernels.code_facts import CostError
    from qengine.kernels.cost import kernel_time

    if card is None:
        notes.add("no predictions: the cost model does not know this card (kernels/cards.py)")
        return None
    try:
        return kernel_time(card, m, n, k).us
    except CostError as error:
        notes.add(str(error))
        return None


def attention(*, quick: bool) -> dict:
    """Microseconds of one layer's decode and prefill attention, 28 query heads on 4 KV heads and 32 on 32, of 128."""
    from qengine.kernels.paged_attn.cache import BlockLayout, KVPool
    from qengine.kernels.paged_attn.decode import paged_decode

    rows = []
    kinds = ["float16", "int8"] if quick else ["float16", "int8", "int4"]
    for heads, kv_heads in ((32, 32), (28, 4)):
        for kind in kinds:
            layout = BlockLayout(kind, kv_heads, 128, 16)
            for count, length in ((1, 1024), (16, 1024)) if quick else ((1, 1024), (1, 4096), (16, 1024), (64, 1024)):
                blocks = -(-length // 16)
                pool = KVPool.allocate(layout, 1, count * blocks, "cuda")
                cache = pool.layer(0)
                tables = torch.randperm(count * blocks, device="cuda").view(count, blocks).int()
                lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
                q = torch.randn(count, heads, 128, device="cuda", dtype=torch.float16)
                out = torch.empty_like(q)
                options = {"max_seq_len": length, "scale": 128**-0.5}
                time = 1e3 * _timed(lambda: paged_decode(q, cache, tables, lens, out, **options))  # noqa: B023
                row = {"what": "decode", "heads": heads, "kv_heads": kv_heads, "kind": kind}
                rate = pool.storage.nbytes / time / 1e3
                rows.append(row | {"sequences": count, "length": length, "us": time, "gb_per_s": rate})
            rows.append(_prefill(layout, heads, 512 if quick else 2048))
    return {"rows": rows, "predictions": _attention_predictions(rows)}


def _prefill(layout, heads: int, length: int) -> dict:
    from qengine.kernels.paged_attn.cache import KVPool
    from qengine.kernels.paged_attn.prefill import paged_prefill

    pool = KVPool.allocate(layout, 1, length // 16, "cuda")
    tables = torch.arange(length // 16, device="cuda").int()[None]
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    q = torch.randn(length, heads, 128, device="cuda", dtype=torch.float16)
    out, cache = torch.empty_like(q), pool.layer(0)
    options = {"max_query_len": length, "scale": 128**-0.5}
    time = 1e3 * _timed(lambda: paged_prefill(q, cache, tables, lens, starts, out, **options))
    row = {"what": "prefill", "heads": heads, "kv_heads": layout.kv_heads, "kind": layout.kind, "sequences": 1}
    return row | {"length": length, "us": time, "tflop_per_s": 2 * heads * 128 * length**2 / time / 1e6}


def _attention_predictions(rows: list[dict]) -> list[float | None]:
    """The cost model's microseconds for each row, None where the card is not known."""
    from qengine.kernels.cost import ATTENTION_RATE
    from qengine.plan.speed import KV_BYTES

    card = _known_card()
    if card is None:
        return [None] * len(rows)
    found: list[float | None] = []
    for row in rows:
        if row["what"] == "decode":
            read = row["sequences"] * row["length"] * 2 * row["kv_heads"] * 128 * KV_BYTES[row["kind"]]
            found.append(read / (card.peak * card.reach) / 1e3 + card.start)
        else:
            products = row["heads"] * 128 * row["length"] ** 2
            found.append(products / (card.mma * card.count * card.clock * 1e3 * ATTENTION_RATE) + card.start)
    return found

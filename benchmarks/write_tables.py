"""Writing what is shipped under kernels/launch_tables from the compiler and the cost model: counts of machine code
for every launch that can be chosen, and predicted launch tables. Called by t4_model.py."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import triton

from qengine.kernels.code_facts import (
    CodeFacts,
    compiled_facts,
    key,
    load_facts,
    normal,
    over_budget,
    write_facts,
)
from qengine.kernels.cost import CARDS, MODELS, kernel_time
from qengine.kernels.launch import BUCKETS, FINER, SHARED, SM_COUNT, TABLES, Launch, forget_tables, pick
from qengine.kernels.w4a16.tuning import candidates, with_splits

CARD_OF = {75: "T4", 80: "A100 40GB", 86: "RTX 3060", 89: "RTX 4060"}
"""Whose multiprocessors, clock and bandwidth a predicted table is made for; others of the capability take its tiles."""

GROUPS = (0, 128, 64, 32, 16)
SHAPES = sorted({(s.n, s.k) for model in MODELS.values() for s in model.linears} | {(576, 576), (1536, 576)})
Kind = tuple[Launch, int, int, int]
"""(launch, capability, bits, group)"""


def chosen_kinds(sms: Iterable[int] = tuple(SM_COUNT)) -> list[Kind]:
    """Every kernel that `pick` can give on these capabilities."""
    found: dict[str, Kind] = {}
    for sm, bits in itertools.product(sms, (4, 8)):
        for group, m, (n, k) in itertools.product(GROUPS, (*BUCKETS, *FINER), SHAPES):
            launch = pick(m, n, k, group, sm, SHARED[sm], bits)
            if launch.kernel != "dequantize":
                kept, kind = normal(launch, bits, group)
                found.setdefault(key(launch, sm, bits, group), (kept, sm, bits, kind))
    return list(found.values())


def compile_kinds(kinds: Iterable[Kind], known: dict[str, CodeFacts]) -> dict[str, CodeFacts]:
    """Counts of each kind by key; those already known are not compiled again."""
    wanted = {key(*kind): kind for kind in kinds}
    found = {name: known[name] for name in wanted if name in known}
    missing = {name: kind for name, kind in wanted.items() if name not in known}
    print(f"{len(found)} known, {len(missing)} to compile", flush=True)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, facts in zip(missing, pool.map(_compile, missing.values(), chunksize=4), strict=True):
            found[name] = facts
    return found


def _compile(kind: Kind) -> CodeFacts:
    return compiled_facts(*kind)


def write_code(keep: bool) -> None:
    """Write code.json. keep: trust the counts it has, which is right while neither kernels nor Triton have changed."""
    found = compile_kinds(chosen_kinds(), load_facts() if keep else {})
    write_facts(found, triton.__version__)
    print(f"wrote the counts of {len(found)} launches")


def predicted_rows(sm: int, bits: int, group: int, known: dict[str, CodeFacts]) -> list[dict]:
    """The launch of least predicted time for every shape and bucket, among those within the budget."""
    card, rows = CARDS[CARD_OF[sm]], []
    for (n, k), m in itertools.product(SHAPES, BUCKETS):
        best: tuple[float, Launch] | None = None
        for launch in candidates(m, sm, SHARED[sm], bits, group):
            if launch.kernel == "gemm" and over_budget(launch, known[key(launch, sm, bits, group)], sm, bits):
                continue
            for tried in with_splits(launch, m, n, k, bits, card.count):
                us = kernel_time(card, m, n, k, bits, group, tried).us
                # of equals the one with the fewest parts: sums cost more than is predicted rather than less
                if best is None or us < best[0] * (0.99 if tried.split > best[1].split else 1.0):
                    best = us, tried
        assert best is not None, f"nothing fits sm_{sm} at M={m}"
        row = {"m": m, "n": n, "k": k, "bits": bits, "group": group, "predicted_us": round(best[0], 2)}
        rows.append({**row, "launch": asdict(best[1])})
    return rows


def write_table(sm: int, keep: bool) -> None:
    """Write launch_tables/sm{sm}.json from predictions, and add the counts it needs to code.json."""
    bits, group = 4, 128
    kinds = {}
    for m in BUCKETS:
        for launch in candidates(m, sm, SHARED[sm], bits, group):
            if launch.kernel == "gemm":
                kept, kind = normal(launch, bits, group)
                kinds[key(launch, sm, bits, group)] = (kept, sm, bits, kind)
    shipped = load_facts()
    found = compile_kinds(kinds.values(), shipped if keep else {})
    # kernel_time looks counts up among the shipped ones
    write_facts({**shipped, **found}, triton.__version__)
    rows = predicted_rows(sm, bits, group, found)
    head = {"sm": sm, "count": CARDS[CARD_OF[sm]].count, "device": CARD_OF[sm], "predicted": True}
    head["made_by"] = f"python benchmarks/t4_model.py --write-table {sm}"
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n'
    (TABLES / f"sm{sm}.json").write_text(text)
    forget_tables()
    print(f"wrote {len(rows)} rows for {CARD_OF[sm]}; now --write-code --keep drops counts that nothing needs")

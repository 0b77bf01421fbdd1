"""What the packed GEMM costs on a T4, read from its machine code: no GPU is needed.

    python benchmarks/t4_model.py            # tables of kernels and of whole steps of four models
    python benchmarks/t4_model.py --check    # every variant that sm_75 can be given, against its budget; part of CI
    python benchmarks/t4_model.py --h200     # the same model with an H200's numbers, beside what was measured there
    python benchmarks/t4_model.py --json

The model of a kernel: a start, its slowest resource, and a share (UNHIDDEN) of the others, which no kernel hides
wholly. The share is what brings the H200's figures nearest to measurements; `bound` is the time with everything hidden.

    memory   bytes of weights, scales, x and y / (peak bandwidth x the share that a copy reaches)
    issue    instructions of the main loop, one a cycle and scheduler, x rounds of programs on a multiprocessor
    tensor   tensor-core instructions x their cycles, likewise
    start    launch, first loads, the sum of a split's parts: one constant a card

Every number of a card is in CARDS, with its source. `--h200` states how far the model is from measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from qengine.kernels.launch import SHARED, TABLES, Launch, pick
from qengine.kernels.sass import Code
from qengine.kernels.w4a16.aot import inspect_launch, weights_a_turn


@dataclass(frozen=True)
class Card:
    """sm, multiprocessors, clock in GHz, memory in GB/s (peak, and the share a copy reaches), microseconds of a start.

    mma, wgmma: multiply-adds that a multiprocessor does in a cycle by mma.sync and by wgmma.
    """

    sm: int
    count: int
    clock: float
    peak: float
    reach: float
    start: float
    mma: int
    wgmma: int = 0


CARDS = {
    # Datasheet; the clock is what 70 W allow under load (0.9 to 1.2 GHz are reported), the reach is the H200's
    "T4": Card(75, 40, 1.0, 320, 0.885, 5.0, 512),
    # Copy measured 4.25 TB/s of 4.8; the start is the median that the smallest measured kernels have beyond the rest
    "H200": Card(90, 132, 1.755, 4800, 0.885, 2.5, 1280, 2048),
}
MODELS = {
    # name: layers, hidden, (qkv, o, gate_up, down) as N x K, KV heads x head_dim, vocabulary
    "Llama-2-7B": (32, 4096, ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)), 32 * 128, 32000),
    "Qwen2.5-7B": (28, 3584, ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)), 4 * 128, 152064),
    "Llama-3.1-8B": (32, 4096, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 8 * 128, 128256),
    "Qwen2.5-14B": (48, 5120, ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)), 8 * 128, 152064),
}
SMALL_KERNELS = 6
ATTENTION_RATE = 0.4
UNHIDDEN = 0.5
BUDGET = {4: 3.5, 8: 7.0}
VARIANTS = [(bits, group, m) for bits in (4, 8) for group in (0, 128, 64, 32, 16) for m in (1, 16, 32, 512)]


@cache
def _code(launch: Launch, sm: int, bits: int, group: int) -> tuple[Code, int]:
    return inspect_launch(launch, sm, bits, group)


def _tensor_cycles(code: Code, launch: Launch, bits: int, card: Card) -> float:
    """Cycles of a multiprocessor's tensor cores for one program's turn."""
    products = launch.bm * launch.bn * (512 // bits)
    wide = code.main_loop().of("HGMMA") > 0
    return products / (card.wgmma if wide else card.mma)


def kernel_time(
    card: Card, m: int, n: int, k: int, bits: int = 4, group: int = 128, launch: Launch | None = None
) -> dict:
    """Microseconds of y [m, n] = x [m, k] @ W^T, by resource, with the launch that `pick` gives (or the one given)."""
    launch = launch or pick(m, n, k, group, card.sm, SHARED[card.sm], bits, card.count)
    kept = Launch(**{**asdict(launch), "split": min(launch.split, 2), "whole": 0})
    code, shared = _code(kept, card.sm, bits, group)
    block = 512 // bits
    tiles = math.ceil(m / launch.bm) * math.ceil(n / launch.bn)
    turns = tiles * math.ceil(k / block)
    rounds = math.ceil(tiles / card.count) * math.ceil(k / block)
    busiest = math.ceil(turns / card.count) if launch.split > 1 else rounds
    issue = busiest * code.main_loop().total * launch.warps / 4 / card.clock / 1e3
    tensor = busiest * _tensor_cycles(code, launch, bits, card) / card.clock / 1e3
    groups = math.ceil(k / group) if group else 1
    rereads = 1 if 2 * m * k < 2 << 20 else math.ceil(n / launch.bn) / 8
    moved = n * k * bits / 8 + groups * n * 4 + 2 * m * k * max(1, rereads) + 2 * m * n
    memory = moved / (card.peak * card.reach) / 1e3
    slowest = max(issue, tensor, memory)
    bound = slowest + card.start
    total = bound + UNHIDDEN * (issue + tensor + memory - slowest)
    weights = weights_a_turn(launch, bits)
    return {
        "m": m, "n": n, "k": k, "bits": bits, "group": group, "us": total, "memory_us": memory, "issue_us": issue,
        "tensor_us": tensor, "bound_us": bound, "bandwidth_share": moved / (total * 1e3) / card.peak,
        "bandwidth_bound": moved / (bound * 1e3) / card.peak,
        "tensor_share": m * n * k / (total * 1e3 * card.clock * card.count * (card.wgmma or card.mma)),
        "registers": code.registers, "stack": code.stack, "shared": shared,
        "hmma": code.main_loop().of("HMMA", "HGMMA"),
        "instructions_a_weight": code.main_loop().total * 32 / weights, "launch": asdict(launch),
    }  # fmt: skip


def step_time(card: Card, name: str, m: int, context: int) -> dict:
    """Milliseconds of one step of m tokens: m sequences' decode at `context` if m <= 64, else a prefill of m tokens."""
    layers, hidden, linears, kv, vocab = MODELS[name]
    products = sum(kernel_time(card, m, n, k)["us"] for n, k in linears) * layers
    small = SMALL_KERNELS * layers * card.start
    rows = m if m <= 64 else 1
    head = (2 * vocab * hidden / (card.peak * card.reach)) / 1e3 + card.start
    if m <= 64:
        attention = layers * (rows * context * kv * 4 / (card.peak * card.reach) / 1e3 + card.start)
    else:
        macs = m * m * hidden
        attention = layers * macs / (card.mma * card.count * card.clock * 1e3 * ATTENTION_RATE)
    total = products + small + head + attention
    return {
        "model": name, "tokens": m, "context": context, "ms": total / 1e3, "linears_ms": products / 1e3,
        "attention_ms": attention / 1e3, "head_ms": head / 1e3, "small_ms": small / 1e3,
        "tokens_per_s": m / total * 1e6,
    }  # fmt: skip


def _variant(variant: tuple[int, int, int]) -> dict:
    bits, group, m = variant
    return kernel_time(CARDS["T4"], m, 4096, 4096, bits, group)


def check() -> list[str]:
    """What breaks the budget of sm_75, one line each."""
    card, wrong = CARDS["T4"], []
    with ProcessPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(_variant, VARIANTS))
    for (bits, group, m), r in zip(VARIANTS, results, strict=True):
        name = f"{bits} bits, group {group or 'none'}, M={m} ({r['launch']['bm']}x{r['launch']['bn']})"
        print(
            f"{name:42} {r['registers']:4} registers {r['shared']:6} B shared {r['hmma']:4} HMMA "
            f"{r['instructions_a_weight']:5.2f} instructions a weight"
        )
        if r["stack"]:
            wrong.append(f"{name}: {r['stack']} bytes of stack; none is allowed")
        if r["shared"] > 65536:
            wrong.append(f"{name}: {r['shared']} bytes of shared memory; 65536 are allowed")
        if not r["hmma"]:
            wrong.append(f"{name}: no HMMA in the main loop")
        if m <= 16 and r["instructions_a_weight"] > BUDGET[bits] + 0.005:
            wrong.append(f"{name}: {r['instructions_a_weight']:.2f} instructions a weight; {BUDGET[bits]} are allowed")
    for model, (_, _, linears, _, _) in MODELS.items():
        for n, k in linears:
            small, large = kernel_time(card, 16, n, k), kernel_time(card, 512, n, k)
            if small["bandwidth_bound"] < 0.8 and n * k > 32 << 20:
                wrong.append(f"{model} {n}x{k} M=16: {small['bandwidth_bound']:.0%} of the bandwidth; 80% are due")
            if large["tensor_share"] < 0.45:
                wrong.append(f"{model} {n}x{k} M=512: {large['tensor_share']:.0%} of the tensor cores; 45% are due")
    return wrong


def against_h200() -> list[dict]:
    """The shipped H200 measurements beside the model's figures for the same launches."""
    rows = json.loads((Path(TABLES) / "sm90.json").read_text())["rows"]
    found = []
    for row in rows:
        if row["launch"]["kernel"] != "gemm":
            continue
        m = 1 if row["m"] == 8 else row["m"]
        r = kernel_time(CARDS["H200"], m, row["n"], row["k"], row["bits"], row["group"], Launch(**row["launch"]))
        found.append({**r, "measured_us": row["us"], "error": r["us"] / row["us"] - 1})
    return found


def _print_kernels(rows: list[dict], measured: bool) -> None:
    print(f"{'M':>5} {'N':>6} {'K':>6} {'us':>8} {'bound':>8} {'memory':>8} {'issue':>8} {'tensor':>8}", end="")
    print(f" {'GB/s %':>7} {'HMMA %':>7}", end="")
    print(f" {'measured':>9} {'error':>6}" if measured else f" {'inst/w':>7} {'regs':>5}")
    for r in rows:
        print(
            f"{r['m']:5} {r['n']:6} {r['k']:6} {r['us']:8.1f} {r['bound_us']:8.1f} {r['memory_us']:8.1f} "
            f"{r['issue_us']:8.1f} {r['tensor_us']:8.1f} {r['bandwidth_share']:7.0%} {r['tensor_share']:7.0%}", end=""
        )  # fmt: skip
        extra = f" {r.get('measured_us', 0):9.1f} {r.get('error', 0):+6.0%}"
        print(extra if measured else f" {r['instructions_a_weight']:7.2f} {r['registers']:5}")


def main() -> int:
    """Print the tables, or check the budgets; the exit status is the number of broken ones, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compile every variant for sm_75 against its budget")
    parser.add_argument("--h200", action="store_true", help="the model with an H200's numbers beside measurements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    if options.check:
        wrong = check()
        print(*wrong, sep="\n")
        print(f"{len(wrong)} budgets broken" if wrong else "every variant is within its budget")
        return min(1, len(wrong))
    if options.h200:
        rows = against_h200()
        errors = [abs(r["error"]) for r in rows]
        summary = {"median_error": statistics.median(errors), "largest_error": max(errors), "rows": rows}
        if options.json:
            print(json.dumps(summary))
        else:
            _print_kernels(rows, True)
            print(f"median error {summary['median_error']:.0%}, largest {summary['largest_error']:.0%}")
        return 0
    card = CARDS["T4"]
    shapes = sorted({shape for model in MODELS.values() for shape in model[2]})
    kernels = [kernel_time(card, m, n, k) for m in (1, 16, 64, 512, 2048) for n, k in shapes]
    steps = [step_time(card, name, m, c) for name in MODELS for m, c in ((1, 1024), (16, 1024), (2048, 2048))]
    if options.json:
        print(json.dumps({"card": asdict(card), "kernels": kernels, "steps": steps}))
        return 0
    _print_kernels(kernels, False)
    for s in steps:
        print(
            f"{s['model']:13} {s['tokens']:5} tokens, context {s['context']:5}: {s['ms']:8.1f} ms "
            f"(linears {s['linears_ms']:.1f}, attention {s['attention_ms']:.1f}, head {s['head_ms']:.1f}, "
            f"small {s['small_ms']:.1f}) {s['tokens_per_s']:8.0f} tokens/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

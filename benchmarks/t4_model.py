"""What the packed GEMM costs on a T4, read from its machine code: no GPU is needed.

    python benchmarks/t4_model.py                   # tables of kernels and of whole steps of four models
    python benchmarks/t4_model.py --card "RTX 2060" # the same for another card of qengine/kernels/cards.py
    python benchmarks/t4_model.py --check           # every variant that sm_75 can be given, against its budget; in CI
    python benchmarks/t4_model.py --h200            # the model with an H200's numbers, beside what was measured there
    python benchmarks/t4_model.py --write-table 75  # the launch table of a capability, from predictions (minutes)
    python benchmarks/t4_model.py --write-code      # counts of every launch that can be chosen (minutes)
    python benchmarks/t4_model.py --json

The model and its numbers are in qengine/kernels/cost.py. `--h200` states how far it is from measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import triton
import write_tables
from rich.progress import track

from qengine.kernels import sass
from qengine.kernels.code_facts import instructions_a_weight, key, load_facts, over_budget, shipped_version
from qengine.kernels.cost import CARDS, MODELS, Card, StepCost, decode_step, kernel_time, prefill_step
from qengine.kernels.launch import SHARED, TABLES, Launch
from qengine.kernels.w4a16.aot import compile_launch


def check() -> list[str]:
    """What breaks the budget of sm_75, one line each: every kernel that it can be given, compiled now."""
    kinds = write_tables.chosen_kinds([75])
    found = write_tables.compile_kinds(kinds, {})
    wrong = []
    for launch, sm, bits, group in kinds:
        code = found[key(launch, sm, bits, group)]
        tile = f"{launch.bm}x{launch.bn}, {launch.warps} warps, prefetch {launch.prefetch}"
        name = f"{bits} bits, group {group or 'none'}, {tile}"
        print(
            f"{name:50} {code.registers:4} registers {code.shared:6} B shared {code.tensor:4} HMMA "
            f"{instructions_a_weight(code, launch, bits):5.2f} instructions a weight"
        )
        reason = over_budget(launch, code, sm, bits)
        if reason:
            wrong.append(f"{name}: {reason}")
        shipped = load_facts().get(key(launch, sm, bits, group))
        if shipped and shipped_version() == triton.__version__ and shipped != code:
            wrong.append(f"{name}: code.json is out of date; run --write-code")
    return wrong + _gated([kind for kind in kinds if kind[2] == 4]) + _slow()


def _gated(kinds: list[tuple[Launch, int, int, int]]) -> list[str]:
    """What breaks the budget once the product's epilogue has an activation to compute."""
    wrong = []
    for launch, sm, bits, group in track(kinds, "gated products", disable=not sys.stderr.isatty()):
        kernel = compile_launch(launch, sm, bits, group, activation="gelu_tanh")
        stack, shared = sass.read(kernel.asm["cubin"]).stack, kernel.metadata.shared
        if stack or shared > SHARED[sm]:
            wrong.append(f"gated, group {group}, {launch}: {stack} bytes of stack, {shared} of shared memory")
    return wrong


def _slow() -> list[str]:
    card, wrong = CARDS["T4"], []
    for model, shape in MODELS.items():
        for n, k in ((s.n, s.k) for s in shape.linears):
            small, large = kernel_time(card, 16, n, k), kernel_time(card, 512, n, k)
            if small.bandwidth_bound < 0.8 and n * k > 32 << 20:
                wrong.append(f"{model} {n}x{k} M=16: {small.bandwidth_bound:.0%} of the bandwidth; 80% are due")
            if large.tensor_share < 0.45:
                wrong.append(f"{model} {n}x{k} M=512: {large.tensor_share:.0%} of the tensor cores; 45% are due")
    return wrong


def against_h200() -> list[dict]:
    """The shipped H200 measurements beside the model's figures for the same launches."""
    rows = json.loads((Path(TABLES) / "sm90.json").read_text())["rows"]
    found = []
    for row in (r for r in rows if "us" in r):
        m = 1 if row["m"] == 8 else row["m"]
        launch = Launch(**row["launch"])
        r = kernel_time(CARDS["H200"], m, row["n"], row["k"], row["bits"], row["group"], launch)
        found.append({**asdict(r), "measured_us": row["us"], "error": r.us / row["us"] - 1})
    return found


def _print_kernels(rows: list[dict], measured: bool) -> None:
    parts = ("us", "bound_us", "memory_us", "l2_us", "issue_us", "tensor_us", "latency_us")
    print(f"{'M':>5} {'N':>6} {'K':>6} " + " ".join(f"{p.removesuffix('_us'):>8}" for p in parts), end="")
    print(f" {'GB/s %':>7} {'HMMA %':>7}", end="")
    print(f" {'measured':>9} {'error':>6}" if measured else f" {'inst/w':>7} {'regs':>5}")
    for r in rows:
        print(f"{r['m']:5} {r['n']:6} {r['k']:6} " + " ".join(f"{r[p]:8.1f}" for p in parts), end="")
        print(f" {r['bandwidth_share']:7.0%} {r['tensor_share']:7.0%}", end="")
        registers = r["facts"]["registers"] if r["facts"] else "-"
        extra = f" {r.get('measured_us', 0):9.1f} {r.get('error', 0):+6.0%}"
        print(extra if measured else f" {r['instructions_a_weight']:7.2f} {registers:>5}")


def print_h200(as_json: bool) -> None:
    """The model's errors on an H200."""
    rows = against_h200()
    errors = [abs(r["error"]) for r in rows]
    summary = {"median_error": statistics.median(errors), "largest_error": max(errors), "rows": rows}
    if as_json:
        print(json.dumps(summary))
        return
    _print_kernels(rows, True)
    print(f"median error {summary['median_error']:.0%}, largest {summary['largest_error']:.0%}")


def steps_of(card: Card) -> list[tuple[str, str, StepCost]]:
    """(model, kind, cost) of decode steps at 1 and 16 sequences and of a prefill, for every model."""
    found = []
    for name, shape in MODELS.items():
        found += [(name, "decode", decode_step(card, shape, s, 1024)) for s in (1, 16)]
        found.append((name, "prefill", prefill_step(card, shape, 2048)))
    return found


def print_card(name: str, as_json: bool) -> None:
    """Kernels and steps of one card."""
    card = CARDS[name]
    shapes = sorted({(s.n, s.k) for shape in MODELS.values() for s in shape.linears})
    kernels = [asdict(kernel_time(card, m, n, k)) for m in (1, 16, 64, 512, 2048) for n, k in shapes]
    steps = steps_of(card)
    if as_json:
        listed = [{"model": m, "kind": k, **asdict(s), "tokens_per_s": s.tokens_per_s} for m, k, s in steps]
        print(json.dumps({"card": {"name": name, **asdict(card)}, "kernels": kernels, "steps": listed}))
        return
    _print_kernels(kernels, False)
    for model, kind, s in steps:
        print(
            f"{model:13} {kind:7} {s.tokens:5} tokens, context {s.context:5}: {s.ms:8.1f} ms "
            f"(linears {s.linears_ms:.1f}, attention {s.attention_ms:.1f}, head {s.head_ms:.1f}, "
            f"small {s.small_ms:.1f}) {s.tokens_per_s:8.0f} tokens/s"
        )


def main() -> int:
    """Print the tables, or check the budgets; the exit status is the number of broken ones, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--card", choices=list(CARDS), default="T4", help="whose tables to print")
    parser.add_argument("--check", action="store_true", help="compile every variant for sm_75 against its budget")
    parser.add_argument("--h200", action="store_true", help="the model with an H200's numbers beside measurements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write-code", action="store_true", help="compile every launch that can be chosen")
    parser.add_argument(
        "--write-table", type=int, choices=list(write_tables.CARD_OF), metavar="SM", help="75, 80, 86, 89"
    )
    parser.add_argument("--keep", action="store_true", help="with --write-...: compile only what has no counts yet")
    options = parser.parse_args()
    if options.write_table:
        write_tables.write_table(options.write_table, options.keep)
        return 0
    if options.write_code:
        write_tables.write_code(options.keep)
        return 0
    if options.check:
        wrong = check()
        print(*wrong, sep="\n")
        print(f"{len(wrong)} budgets broken" if wrong else "every variant is within its budget")
        return min(1, len(wrong))
    if options.h200:
        print_h200(options.json)
    else:
        print_card(options.card, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `qengine plan` foresees beside what an engine measures when it starts: needs a CUDA device.

    python benchmarks/plan_check.py
    python benchmarks/plan_check.py --shapes llama-2-7b --memory-gib 14.6 --out benchmarks/results

Each shape of random weights is planned, then loaded with the same settings; parts of the memory and tokens of cache
are put side by side, in plan_check.json and .md where --out names a folder.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from qengine import LLM
from qengine.bench.about import commit, versions
from qengine.plan import PlanOptions, plan_model
from qengine.plan.cards import this_card
from qengine.random_model import random_checkpoint

GIB = 2**30
PARTS = ("weights", "step", "graphs", "context", "margin", "cache")


def planned(shape: str, options: PlanOptions) -> dict[str, Any]:
    """Parts in GiB and tokens, from headers, for the card of this machine."""
    card = this_card()
    if card is None:
        raise SystemExit("no CUDA device, or none that qengine plan knows")
    plan = plan_model(random_checkpoint(shape, "cpu"), card, options)
    parts = plan.memory.parts
    own = {name: parts[name] / GIB for name in ("step", "graphs", "context", "margin")}
    own["weights"] = sum(parts.get(name, 0) for name in ("layers", "head", "embedding")) / GIB
    tokens = plan.cache[plan.kind]["tokens"]
    return {
        **own,
        "cache": tokens * plan.cache[plan.kind]["bytes_per_token"] / GIB,
        "tokens": tokens,
        "kind": plan.kind,
    }


def measured(shape: str, options: PlanOptions) -> dict[str, Any]:
    """The same from an engine that has started."""
    settings = {name: value for name, value in asdict(options).items() if name != "memory_gib" and value is not None}
    with LLM(
        f"random:{shape}", skip_tokenizer_init=True, swap_space=0, gpu_memory_limit=options.memory_gib, **settings
    ) as llm:
        assert llm.memory is not None, "an engine on a GPU says what its memory is taken by"
        use = {name: value / GIB for name, value in asdict(llm.memory).items()}
        return use | {"tokens": llm.engine.limits.pool_tokens}


def compare(shape: str, options: PlanOptions) -> dict[str, Any]:
    """Both, and by how much the planned tokens differ, in percent."""
    plan = planned(shape, options)
    found = measured(shape, options)
    off = 100 * (plan["tokens"] / found["tokens"] - 1)
    return {"shape": shape, "kind": plan["kind"], "planned": plan, "measured": found, "tokens_off_percent": off}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["model, cache", *(f"{name} planned / found" for name in (*PARTS, "tokens")), "tokens"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        plan, found = row["planned"], row["measured"]
        sizes = [f"{plan[name]:.3f} / {found[name]:.3f}" for name in PARTS]
        cells = [f"{row['shape']}, {row['kind']}", *sizes, f"{plan['tokens']:,} / {found['tokens']:,}"]
        lines.append("| " + " | ".join([*cells, f"{row['tokens_off_percent']:+.1f}%"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-2-7b,qwen2.5-7b", help="comma-separated names of random shapes")
    parser.add_argument("--kv-cache-dtypes", default="float16,int8", help="comma-separated kinds of cache")
    parser.add_argument("--memory-gib", type=float, default=14.6)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="folder for plan_check.json and plan_check.md")
    given = parser.parse_args()
    base = PlanOptions(
        memory_gib=given.memory_gib,
        dtype="float16",
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_num_batched_tokens,
    )
    rows = []
    for shape in given.shapes.split(","):
        for kind in given.kv_cache_dtypes.split(","):
            rows.append(compare(shape, replace(base, kv_cache_dtype=kind)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        report = {
            "benchmark": "plan_check",
            "card": torch.cuda.get_device_name(0),
            "versions": versions(),
            "commit": commit(),
            "time": when,
            "options": asdict(base),
            "rows": rows,
        }
        (given.out / "plan_check.json").write_text(json.dumps(report, indent=2) + "\n")
        (given.out / "plan_check.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()

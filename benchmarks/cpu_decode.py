"""Decode speed on the CPU: qengine with INT4 weights beside transformers in float32, in one run on one machine.

Both generate greedily from the same prompts; a decode rate is the tokens added between a short and a long run over
the time added, so that prefill and start-up drop out. Rounds alternate between the two, and medians are compared.

    python benchmarks/cpu_decode.py                    # the demo model, batch 1 and 8
    python benchmarks/cpu_decode.py --rounds 5 --out benchmarks/results/cpu_decode.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qengine import LLM, SamplingParams
from qengine.cli.demo import ensure_demo_checkpoints
from qengine.cli.version import versions

PROMPT = "The lighthouse keeper climbed the stairs every evening, and this time he noticed that"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--short", type=int, default=8, help="tokens of the short run")
    parser.add_argument("--long", type=int, default=72, help="tokens of the long run")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; the median is reported")
    parser.add_argument("--method", choices=["awq", "gptq"], default="awq", help="which INT4 checkpoint")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here as well")
    return parser.parse_args()


def decode_rate(run: Callable[[int], None], batch: int, short: int, long: int) -> float:
    """Tokens/s of decode steps: `run(n)` generates exactly n tokens for each of `batch` prompts."""
    start = time.perf_counter()
    run(short)
    middle = time.perf_counter()
    run(long)
    end = time.perf_counter()
    return batch * (long - short) / ((end - middle) - (middle - start))


def qengine_runner(llm: LLM, ids: list[int], batch: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": ids}] * batch, params, use_tqdm=False)
        assert all(len(r.outputs[0].token_ids) == n for r in results)

    return run


def transformers_runner(model: torch.nn.Module, ids: list[int], batch: int) -> Callable[[int], None]:
    inputs = torch.tensor([ids] * batch)

    def run(n: int) -> None:
        with torch.inference_mode():
            out = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, min_new_tokens=n, max_new_tokens=n
            )
        assert out.shape == (batch, len(ids) + n)

    return run


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    arguments = parse_arguments()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = ensure_demo_checkpoints()
    ids = AutoTokenizer.from_pretrained(folders["original"])(PROMPT)["input_ids"]
    peer = AutoModelForCausalLM.from_pretrained(folders["original"], dtype=torch.float32).eval()
    llm = LLM(str(folders[arguments.method]), device="cpu", max_model_len=512, enable_prefix_caching=False)
    rows = []
    for batch in arguments.batches:
        runs = {"qengine": qengine_runner(llm, ids, batch), "transformers": transformers_runner(peer, ids, batch)}
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(arguments.short)
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                rates[name].append(decode_rate(run, batch, arguments.short, arguments.long))
        row = {"batch": batch}
        for name, values in rates.items():
            row[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        row["ratio"] = row["qengine"]["median"] / row["transformers"]["median"]
        rows.append(row)
    llm.close()
    report = {
        "benchmark": "cpu_decode",
        "unit": "tokens/s",
        "model": "SmolLM2-135M-Instruct",
        "qengine_weights": f"{arguments.method} INT4, group 64",
        "transformers_weights": "float32",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "commit": commit(),
        "rows": rows,
    }
    print(f"{report['cpu']}, {report['threads']} threads; decode tokens/s, median of {arguments.rounds} (min to max)")
    print(f"{'batch':>5} {'qengine ' + arguments.method + ' INT4':>26} {'transformers float32':>26} {'ratio':>7}")
    for row in rows:
        cells = [
            f"{row[n]['median']:.1f} ({row[n]['min']:.1f} to {row[n]['max']:.1f})" for n in ("qengine", "transformers")
        ]
        print(f"{row['batch']:>5} {cells[0]:>26} {cells[1]:>26} {row['ratio']:>6.2f}x")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

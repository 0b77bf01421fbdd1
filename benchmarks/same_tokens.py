"""The loads of serving.py with the card's own code and with sm_75's, and whether their greedy tokens are the same.

    python benchmarks/same_tokens.py --shape llama-2-7b --memory-gib 14.6 --kv-cache-dtype float16
    python benchmarks/same_tokens.py --shape qwen2.5-7b --loads latency,mixed --name same_tokens_qwen

Two processes hold the same random model, one of them under TRITON_OVERRIDE_ARCH=sm75, and run every load. Random
weights make near ties frequent, and past the first other token a sequence is another one. So each request is compared
up to its first difference, and there both processes are asked for the log-probabilities of both tokens: a tie is a gap
of at most three times the largest difference that the two codes have anyway, taken at contexts drawn at random.
Exit code 1 if a difference is no tie or a load did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qengine.bench.about import commit, versions

RESULTS = Path(__file__).parent / "results"
LOADS = ("latency", "ttft", "streams", "mixed", "oversubscribed")
TOP, SAMPLES, TIMES = 20, 256, 3.0
Context = list[int]


class Side:
    """A process with the model. arch: None for the card's own code."""

    def __init__(self, task: dict[str, Any], arch: str | None, folder: Path) -> None:
        environment = dict(os.environ)
        environment.pop("TRITON_OVERRIDE_ARCH", None)
        if arch is not None:
            environment |= {"TRITON_OVERRIDE_ARCH": arch, "TRITON_CACHE_DIR": str(folder / "triton")}
        self._answers = folder / f"answers_{arch}.json"
        command = [sys.executable, __file__, "--child", json.dumps(task | {"answers": str(self._answers)})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def answer(self) -> Any:
        """What the child has written. Raises SystemExit if it ended instead."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line == b"ready\n":
                return json.loads(self._answers.read_text(encoding="utf-8"))
        raise SystemExit(f"a process with the model ended with {self._process.wait()}")

    def ask(self, contexts: list[Context]) -> None:
        """Have the log-probabilities of the tokens after each context computed; `answer` gives them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(contexts).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def child(task: dict[str, Any]) -> None:
    """Run the loads and write their tokens; then answer each line of contexts."""
    from qengine.bench.loads import FULL, LoadMaker
    from qengine.bench.measure import run_load
    from qengine.llm import LLM
    from qengine.sampling_params import SamplingParams

    found: dict[str, Any] = {}

    def ready(value: Any) -> None:
        Path(task["answers"]).write_text(json.dumps(value), encoding="utf-8")
        print("ready", flush=True)

    def run(llm: LLM, load: Any) -> None:
        start = time.perf_counter()
        row = run_load(llm, [load])
        seconds = time.perf_counter() - start
        found[load.name] = {"prompts": load.prompts, "tokens": row.tokens, "seconds": round(seconds, 2)}
        print(f"{os.environ.get('TRITON_OVERRIDE_ARCH', 'native')} {load.name} {seconds:.1f} s", file=sys.stderr)

    pool = {"num_gpu_blocks_override": -(-task["pool_tokens"] // 16), "swap_space": 4}
    with LLM(task["model"], swap_space=0, **task["settings"]) as llm:
        maker = LoadMaker(llm.engine.limits.sample_vocab, FULL)
        loads = maker.vllm_loads()
        for name in LOADS[:-1]:
            if name in task["loads"]:
                run(llm, loads[name][0])
    with LLM(task["model"], **task["settings"], **pool) as llm:
        if "oversubscribed" in task["loads"]:
            run(llm, maker.oversubscribed(llm.engine.limits.pool_tokens))
        ready(found)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=TOP, detokenize=False)
        while line := sys.stdin.readline():
            prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
            outputs = [r.outputs[0].logprobs or [] for r in llm.generate(prompts, params, use_tqdm=False)]
            ready([{str(token): entry.logprob for token, entry in one[0].items()} for one in outputs])


def differences(own: dict[str, Any], other: dict[str, Any]) -> list[tuple[int, int]]:
    """(request, position) of the first token that differs, of each request that has one."""
    found = []
    for index, (a, b) in enumerate(zip(own["tokens"], other["tokens"], strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            found.append((index, at))
    return found


def probe(sides: list[Side], contexts: list[Context]) -> list[list[dict[str, float]]]:
    """Of each context what either side has: token -> log-probability, its TOP largest."""
    for side in sides:
        side.ask(contexts)
    return [list(pair) for pair in zip(*(side.answer() for side in sides), strict=True)]


def error(pair: list[dict[str, float]]) -> float:
    """The largest difference of the two codes over tokens that both have near the top."""
    return max(abs(pair[0][token] - pair[1][token]) for token in pair[0].keys() & pair[1].keys())


def gap(row: dict[str, float], a: int, b: int) -> float:
    """How far apart one code has two tokens; infinite if one is not near the top."""
    return abs(row[str(a)] - row[str(b)]) if str(a) in row and str(b) in row else float("inf")


def compare(sides: list[Side], own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Every load's differences, held against what the two codes differ by anyway."""
    draw, contexts = random.Random(0), []
    for _ in range(SAMPLES):
        load = own[draw.choice(list(own))]
        index = draw.randrange(len(load["prompts"]))
        contexts.append(load["prompts"][index] + load["tokens"][index][: draw.randrange(len(load["tokens"][index]))])
    sample = probe(sides, contexts)
    errors = [error(pair) for pair in sample]
    tops = [sorted(pair[0].values(), reverse=True)[:2] for pair in sample]
    tie = TIMES * max(errors)
    result: dict[str, Any] = {
        "sample": {
            "contexts": len(sample),
            "error_median": statistics.median(errors),
            "error_max": max(errors),
            "gap_of_best_two_median": statistics.median(a - b for a, b in tops),
        },
        "tie_at_most": tie,
        "loads": {},
    }
    for name, load in own.items():
        where = differences(load, other[name])
        rows = probe(sides, [load["prompts"][i] + load["tokens"][i][:at] for i, at in where]) if where else []
        gaps = []
        for (index, at), pair in zip(where, rows, strict=True):
            tokens = load["tokens"][index][at], other[name]["tokens"][index][at]
            gaps.append(max(gap(row, *tokens) for row in pair))
        result["loads"][name] = {
            "requests": len(load["tokens"]),
            "same": len(load["tokens"]) - len(where),
            "tokens_compared": sum(len(t) for t in load["tokens"])
            - sum(len(load["tokens"][i]) - a - 1 for i, a in where),
            "gap_median": statistics.median(gaps) if gaps else None,
            "gap_max": max(gaps) if gaps else None,
            "not_ties": sum(value > tie for value in gaps),
            "seconds": [load["seconds"], other[name]["seconds"]],
        }
    return result


def main() -> int:
    """Start both, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b", help="a name of qengine.random_model")
    parser.add_argument("--loads", default=",".join(LOADS), help="some of these, by commas")
    parser.add_argument("--kv-cache-dtype", default="float16")
    parser.add_argument("--memory-gib", type=float, default=14.6, help="most GPU memory of each process")
    parser.add_argument("--arch", default="sm75", help="what TRITON_OVERRIDE_ARCH is set to in the second process")
    parser.add_argument("--pool-tokens", type=int, default=8192, help="cache of the oversubscribed load")
    parser.add_argument("--name", help="of the report")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    import torch

    settings = {
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "dtype": "float16", "max_model_len": 2048,
        "kv_cache_dtype": args.kv_cache_dtype, "gpu_memory_limit": args.memory_gib,
    }  # fmt: skip
    loads = [name for name in args.loads.split(",") if name]
    if unknown := set(loads) - set(LOADS):
        parser.error(f"--loads {', '.join(sorted(unknown))}: not known; give some of {', '.join(LOADS)}")
    task = {"model": f"random:{args.shape}", "settings": settings, "loads": loads, "pool_tokens": args.pool_tokens}
    with tempfile.TemporaryDirectory(prefix="qengine-same-") as folder:
        sides = [Side(task, None, Path(folder)), Side(task, args.arch, Path(folder))]
        found = compare(sides, *(side.answer() for side in sides))
        for side in sides:
            side.close()
    report = {
        "benchmark": "same_tokens", "model": task["model"], "arch": args.arch, "settings": settings,
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None, "versions": versions(),
        "commit": commit(), "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **found,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.name or f"same_tokens_{args.shape}_{args.kv_cache_dtype}"
    text = json.dumps(report, indent=1)
    (args.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(load["not_ties"] for load in found["loads"].values()))


if __name__ == "__main__":
    sys.exit(main())

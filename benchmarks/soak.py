"""A long run under pressure: random arrivals and aborts, a pool far too small, all books checked after every step.

Each round loads the model with other settings (pool, block size, CPU tier, prefix caching, policy) and, for about a
minute, adds random requests (equal beginnings, several sequences each, priorities, streams) and aborts some, while the
engine steps. `check_integrity` runs after every step. At a round's end everything is finished or aborted, and every
block of both tiers must be free. The tokens of greedy requests must be those of a pool that holds everything; where
the two likeliest tokens are closer than --tie in the reference, rounding may choose, and the comparison ends there.

    python benchmarks/soak.py --minutes 60                      # a tiny random model on the CPU
    python benchmarks/soak.py --minutes 5 --model demo          # SmolLM2-135M
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qengine import LLM, SamplingParams
from qengine.bench.about import commit
from qengine.cli.version import versions
from qengine.engine.request import Request
from qengine.layers.attention import KVCache

MAX_LEN = 96
MOST_OUTPUT = 48
GIB = 1024**3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long")
    parser.add_argument("--round", type=float, default=60, help="seconds of arrivals with one set of settings")
    parser.add_argument("--model", default="random:tiny", help="a folder, a random shape, or 'demo'")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prompts", type=int, default=24, help="different prompts")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--tie", type=float, default=1e-3, help="logprob difference below which rounding may choose")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here as well")
    return parser.parse_args()


@dataclass
class Reference:
    """Greedy tokens of a prompt without pressure, and how far the likeliest is ahead of the second at each."""

    prompt: list[int]
    tokens: list[int]
    leads: list[float]


@dataclass
class Soak:
    """What happens in all rounds together."""

    rng: random.Random
    tie: float
    counts: collections.Counter[str] = field(default_factory=collections.Counter)


def load(args: argparse.Namespace, **settings: Any) -> LLM:
    """The model with these settings; block sizes below 8 are for a CPU only."""
    model = args.model
    if model == "demo":
        from qengine.demo_model import ensure_demo_model

        model = str(ensure_demo_model())
    dtype = "float32" if args.device == "cpu" else "float16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pools this small are what it is about
        return LLM(
            model, device=args.device, dtype=dtype, skip_tokenizer_init=True, max_model_len=MAX_LEN, seed=1, **settings
        )


def references(args: argparse.Namespace, rng: random.Random) -> list[Reference]:
    """Prompts of which many begin alike, each with its greedy continuation."""
    prompts: list[list[int]] = []
    while len(prompts) < args.prompts:
        head = rng.choice(prompts)[: rng.randint(1, 24)] if prompts and rng.random() < 0.6 else []
        prompts.append(head + [rng.randint(3, 400) for _ in range(rng.randint(1, 24))])
    params = SamplingParams(temperature=0, max_tokens=MOST_OUTPUT, ignore_eos=True, logprobs=2)
    with load(args, enable_prefix_caching=False) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for prompt, result in zip(prompts, results, strict=True):
        output = result.outputs[0]
        values = [sorted((item.logprob for item in position.values()), reverse=True) for position in output.logprobs]
        found.append(Reference(prompt, output.token_ids, [v[0] - v[1] for v in values]))
    return found


def random_settings(args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """A pool of at most a few sequences, and a CPU tier of none to many."""
    size = rng.choice([1, 2, 4, 8, 16] if args.device == "cpu" else [8, 16])
    return {
        "block_size": size,
        "num_gpu_blocks_override": -(-MAX_LEN // size) + rng.choice([0, 1, 4, 20]),
        "enable_prefix_caching": rng.random() < 0.6,
        "max_num_seqs": rng.choice([2, 5, 16, 64]),
        "max_num_batched_tokens": rng.choice([8, 33, 256]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "priority_ageing": rng.choice([0.5, 30.0]),
        "swap_threshold": rng.choice([0.0, 0.0, 1.0]),
    }


def swap_gib(llm_spec: Any, block_size: int, blocks: int, device: str) -> float:
    """swap_space for so many CPU blocks, as near as a float32 or float16 cache has them."""
    import torch

    dtype = torch.float32 if device == "cpu" else torch.float16
    return blocks * KVCache.bytes_per_block(llm_spec, block_size, dtype) / GIB * 1.0001


def add(llm: LLM, soak: Soak, known: list[Reference], priority: bool) -> tuple[Request, Reference]:
    """A random request for a known prompt."""
    rng, reference = soak.rng, soak.rng.choice(known)
    params = SamplingParams(
        temperature=rng.choice([0, 0, 0, 1.0]),
        max_tokens=rng.randint(1, MOST_OUTPUT),
        ignore_eos=True,
        n=rng.choice([1, 1, 1, 1, 2, 4]),
        prompt_logprobs=1 if rng.random() < 0.05 else None,
    )
    request = llm.engine.add_request(
        reference.prompt,
        params,
        cache_salt=rng.choice([None, None, None, "x"]),
        streamed=rng.random() < 0.5,
        priority=rng.choice([0, 0, 1, -2]) if priority else 0,
    )
    soak.counts["requests"] += 1
    return request, reference


def check(request: Request, reference: Reference, soak: Soak) -> None:
    """A finished request has all its tokens, each once, and greedy ones are the reference's."""
    assert request.error is None, request.error
    for output in request.outputs:
        tokens = output.completion().token_ids
        assert output.finish_reason == "length", output.finish_reason
        assert len(tokens) == request.params.max_tokens, f"{len(tokens)} of {request.params.max_tokens} tokens"
        soak.counts["tokens"] += len(tokens)
        if request.params.temperature == 0:
            for i, token in enumerate(tokens):
                if token != reference.tokens[i]:
                    lead = reference.leads[i]
                    assert lead < soak.tie, f"token {i} is {token}, not {reference.tokens[i]}, which leads by {lead}"
                    soak.counts["ties"] += 1
                    break
            soak.counts["compared"] += 1
    if request.streamed:
        for output in request.outputs:
            streamed = [t for d in request.deltas if d.index == output.seq.index for t in d.token_ids]
            assert streamed == output.completion().token_ids, "a stream is not the output, once each"
    soak.counts["finished"] += 1


def one_round(llm: LLM, soak: Soak, known: list[Reference], seconds: float, priority: bool) -> None:
    """Arrivals and aborts for so many seconds, then the rest to its end."""
    engine, rng = llm.engine, soak.rng
    live: list[tuple[Request, Reference]] = []
    until = time.monotonic() + seconds
    while live or time.monotonic() < until:
        if time.monotonic() < until and len(live) < 40:
            for _ in range(rng.choice([0, 0, 0, 1, 1, 6])):
                live.append(add(llm, soak, known, priority))
        if live and rng.random() < 0.01:
            request, _ = live.pop(rng.randrange(len(live)))
            engine.abort(request)
            engine.check_integrity()
            soak.counts["aborted"] += 1
        engine.step()
        engine.check_integrity()
        soak.counts["steps"] += 1
        for pair in [pair for pair in live if pair[0].finished]:
            check(*pair, soak)
            live.remove(pair)
    stats = engine.stats()
    assert not engine.has_unfinished()
    assert stats.gpu_blocks_used == stats.cpu_blocks_used == 0, f"blocks are not free: {stats}"
    for name in ("preemptions_swapped", "preemptions_recomputed", "blocks_out", "blocks_in", "cpu_hit_tokens"):
        soak.counts[name] += getattr(stats, name)
    soak.counts["prefix_hit_tokens"] += stats.prefix_hit_tokens
    soak.counts["rounds"] += 1


def main() -> None:
    args = parse_arguments()
    soak = Soak(random.Random(args.seed), args.tie)
    known = references(args, soak.rng)
    start = time.monotonic()
    while time.monotonic() - start < args.minutes * 60:
        settings = random_settings(args, soak.rng)
        blocks = soak.rng.choice([0, 3, 20, 100, 400])
        with load(args, swap_space=0, num_gpu_blocks_override=settings["num_gpu_blocks_override"]) as probe:
            spec = probe._loaded_model().spec
        settings["swap_space"] = swap_gib(spec, settings["block_size"], blocks, args.device)
        try:
            with load(args, **settings) as llm:
                left = args.minutes * 60 - (time.monotonic() - start)
                one_round(llm, soak, known, min(args.round, max(left, 1)), settings["scheduling_policy"] == "priority")
        except BaseException:
            print(f"failed with {settings}, seed {args.seed}, after {dict(soak.counts)}", file=sys.stderr)
            raise
        minutes = (time.monotonic() - start) / 60
        print(f"{minutes:6.1f} min  {dict(soak.counts)}", file=sys.stderr, flush=True)
    report = {
        "benchmark": "soak",
        "model": args.model,
        "device": args.device,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "seed": args.seed,
        "integrity_failures": 0,
        "blocks_left_in_use": 0,
        **soak.counts,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

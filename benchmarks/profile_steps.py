"""Where the time of a load goes, step by step: GPU and host time of each kind of step, and kernels of typical steps.

    python benchmarks/profile_steps.py --shape llama-2-7b --memory-gib 14.6 --kv-cache-dtype float16
    python benchmarks/profile_steps.py --shape qwen2.5-7b --memory-gib 14.6 --loads streams,mixed --json

A load is run once as `qengine bench` runs it, then again with clocks around the parts of each step (engine, runner,
sampler) and events around its work on the GPU. Kinds: decode (one token a sequence) and mixed (prompt chunks too) steps
as graphs, eager ones, and steps that captured a graph. "gap" is the time between two steps in which the GPU waited for
the host. Afterwards the kernels of a mixed and a decode step of the load's median size are listed, as graphs and
kernel by kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qengine.bench.loads import Load, LoadMaker
from qengine.bench.measure import run_load
from qengine.bench.step_trace import HOST_PARTS, Step, Tracer, summary
from qengine.engine.step import StepItem
from qengine.llm import LLM


def kernels(runner: Any, work: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of the GPU work of `work`, longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            rows[event.name][0] += 1
            rows[event.name][1] += event.time_range.elapsed_us() / 1e3
    found = [(name[:90], int(count), ms) for name, (count, ms) in rows.items()]
    return sorted(found, key=lambda row: -row[2])


def timed(runner: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """(GPU, host) milliseconds of `work` on the runner's stream, after one call to warm up."""
    work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(runner._stream)
    start = time.perf_counter()
    work()
    host = 1e3 * (time.perf_counter() - start)
    end.record(runner._stream)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host


def look_into(runner: Any, items: list[StepItem]) -> dict[str, Any]:
    """A step computed again, as a graph and kernel by kernel: what it wrote is written once more, alike."""
    ordered = sorted(items, key=lambda item: item.end - item.start > 1)

    @torch.inference_mode()
    def graph() -> Any:
        with torch.cuda.stream(runner._stream):
            return runner._replay(ordered)

    @torch.inference_mode()
    def eager() -> Any:
        with torch.cuda.stream(runner._stream):
            return runner._compute(ordered)

    found: dict[str, Any] = {
        "tokens": sum(item.end - item.start for item in items),
        "sequences": len(items),
        "context": sum(item.end for item in items),
    }
    works = {"eager": eager}
    if graph() is not None:
        works = {"graph": graph, "eager": eager}
    for name, work in works.items():
        gpu, host = timed(runner, work)
        found[name] = {"gpu_ms": gpu, "host_ms": host, "kernels": kernels(runner, work)}
    found["eager"]["functions"] = functions(eager)
    return found


def functions(work: Callable[[], Any], top: int = 16) -> list[tuple[str, int, float]]:
    """(name, calls, milliseconds without what they call) of the host's part of `work`, longest first."""
    clock = cProfile.Profile()
    clock.runcall(work)
    torch.cuda.synchronize()
    rows = []
    for entry in clock.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
        rows.append((name, entry.callcount, 1e3 * entry.inlinetime))
    return sorted(rows, key=lambda row: -row[2])[:top]


class Enough(Exception):
    """Ends a run whose typical steps have been looked into."""


def trace_load(llm: LLM, runs: list[Load]) -> tuple[list[Step], dict[str, Any]]:
    """The steps of a load, and what those of the median size consist of, as a second run meets them."""
    tracer = Tracer(llm)
    start = time.perf_counter()
    run_load(llm, runs)
    seconds = time.perf_counter() - start
    tracer.finish()
    steps, tracer.steps = tracer.steps, []
    inside: dict[str, Any] = {"seconds": seconds}
    kinds = {"prefill": [s for s in steps if s.prefills], "decode": [s for s in steps if not s.prefills]}
    wanted = {kind: medians(own) for kind, own in kinds.items() if own}

    def look(items: list[StepItem], step: Step) -> None:
        kind = "prefill" if step.prefills else "decode"
        if kind in wanted and near(step, *wanted[kind]):
            del wanted[kind]
            inside[kind] = look_into(tracer.runner, items)
        if not wanted:
            raise Enough

    tracer.before = look
    with contextlib.suppress(Enough):
        run_load(llm, runs[:1])
    tracer.close()
    return steps, inside


def medians(steps: list[Step]) -> tuple[float, float]:
    """Tokens and context."""
    return statistics.median(s.tokens for s in steps), statistics.median(s.context for s in steps)


def near(step: Step, tokens: float, context: float) -> bool:
    """Whether the step is about as large."""
    return abs(step.tokens - tokens) <= 0.1 * tokens and step.context >= 0.8 * context


def show(name: str, steps: list[Step], inside: dict[str, Any], top: int) -> None:
    """Print it."""
    print(f"\n== {name}: {inside['seconds']:.2f} s, {len(steps)} steps")
    for kind, row in summary(steps).items():
        head = {k: row[k] for k in ("steps", "tokens", "sequences", "prefills", "context")}
        print(f"{kind:8}", " ".join(f"{k} {v:.0f}" for k, v in head.items()), end="; ")
        print(f"gpu {row['gpu_s']:.2f} s, gap {row['gap_s']:.2f} s; a step: gpu {row['gpu_ms']:.2f}", end=" ")
        print(f"gap {row['gap_ms']:.2f} |", " ".join(f"{part} {row[part]:.2f}" for part in HOST_PARTS), "ms")
    for kind in ("prefill", "decode"):
        if kind not in inside:
            continue
        found = inside[kind]
        print(f"-- {kind}: {found['tokens']} tokens, {found['sequences']} sequences, {found['context']} cached")
        for way in ("graph", "eager"):
            if way in found:
                part = found[way]
                total = sum(ms for _, _, ms in part["kernels"])
                print(f"   {way}: gpu {part['gpu_ms']:.2f}, host {part['host_ms']:.2f}, kernels {total:.2f} ms")
                for label, count, ms in part["kernels"][:top]:
                    print(f"      {ms:8.3f} ms {count:5} x {1e3 * ms / count:8.1f} us  {label}")
                for label, count, ms in part.get("functions", [])[:top]:
                    print(f"      host {ms:8.3f} ms {count:5} calls  {label}")


def main() -> None:
    """Trace loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", help="random weights: llama-2-7b, qwen2.5-7b, ...")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--loads", default="mixed", help="of latency, ttft, streams, mixed")
    parser.add_argument("--top", type=int, default=14, help="kernels to list")
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give a model or --shape")
    start = time.perf_counter()
    llm = LLM(
        args.model or f"random:{args.shape}", skip_tokenizer_init=True, enable_prefix_caching=False, swap_space=0,
        dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype, gpu_memory_limit=args.memory_gib,
        max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - start:.1f} s, {llm.engine.limits.pool_tokens} tokens of cache", flush=True)
    maker = LoadMaker(llm.engine.limits.sample_vocab)
    loads = maker.vllm_loads()
    start = time.perf_counter()
    if args.warm_up:
        llm.engine.warm_up()
        run_load(llm, [maker.warm_up(min(maker.sizes.mixed, args.max_num_seqs))])
        run_load(llm, [maker.warm_up_mixed()])
    graphs = len(llm.engine._runner.graph_bytes())  # type: ignore[attr-defined]
    print(f"warmed up in {time.perf_counter() - start:.1f} s, {graphs} graphs", flush=True)
    for name in args.loads.split(","):
        steps, inside = trace_load(llm, loads[name])
        if args.json:
            print(json.dumps({"load": name, "kinds": summary(steps), **inside}))
        else:
            show(name, steps, inside, args.top)
    llm.close()


if __name__ == "__main__":
    main()

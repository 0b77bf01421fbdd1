"""Time the device sampler on this GPU, each set of options beside the time of reading the logits once.

    python benchmarks/sampler.py --out benchmarks/results

Every figure is a CUDA graph's: as many batches of different logits as exceed the cache several times, the median of the
replays, divided by the number of batches. Writes sampler.json and sampler.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triton

from qengine.bench.about import commit
from qengine.engine.sampler import SampleRow
from qengine.engine.sampler_gpu import GpuSampler
from qengine.kernels.fused.sampling import Shape
from qengine.sampling_params import SamplingParams

OPTIONS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "all, penalties": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    "all, logprobs 5": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 5},
}
ROWS = (1, 8, 32, 256)
VOCABS = (32_000, 152_064)
COLD_BYTES = 256 << 20


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 2 GiB, bytes read and written."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.numel() / sorted(times)[5] / 1e9


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, vocab]: "model", as a language model's (probability falling as a power of the rank), or "flat", normal."""
    if kind == "flat":
        return torch.randn(rows, vocab, device="cuda").to(dtype)
    rank = torch.rand(rows, vocab, device="cuda").argsort(dim=-1).float()
    return (-1.4 * (rank + 2).log() + 0.5 * torch.randn(rows, vocab, device="cuda")).to(dtype)


def time_batches(gpu: GpuSampler, options: dict, logits: list[torch.Tensor], replays: int = 7) -> float:
    """Microseconds to sample one batch."""
    params = SamplingParams(**options)
    rows = [SampleRow(params, [1, 2, 3], 3, seed) for seed in range(logits[0].shape[0])]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch = gpu.prepare(rows)

        def step(x: torch.Tensor) -> None:
            gpu.run(x, batch)
            if batch.plan.lines:
                gpu.token_lines(x, batch)

        step(logits[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x in logits:
                step(x)
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(logits))
    return sorted(times)[len(times) // 2]


def measure(kinds: list[str], rows: tuple[int, ...], vocabs: tuple[int, ...], dtype: torch.dtype) -> list[dict]:
    """One line for each kind of logits, vocabulary and number of rows: microseconds by set of options."""
    found = []
    for kind, vocab, count in itertools.product(kinds, vocabs, rows):
        size = count * vocab * dtype.itemsize
        sets = max(2, min(32, math.ceil(COLD_BYTES / size)))
        logits = [make_logits(kind, count, vocab, dtype) for _ in range(sets)]
        gpu = GpuSampler(count, vocab, "cuda")
        line = {"logits": kind, "vocab": vocab, "rows": count, "bytes": size}
        line["us"], line["flat_rows"] = {}, {}
        for name, options in OPTIONS.items():
            gpu.work.left.zero_()
            line["us"][name] = time_batches(gpu, options, logits)
            line["flat_rows"][name] = int((gpu.work.left < 0).sum())
        found.append(line)
    return found


def table(lines: list[dict], bandwidth: float) -> str:
    """The figures as a Markdown table; the read is the logits' bytes at the measured bandwidth."""
    head = ["logits", "vocab", "rows", "one read", *OPTIONS]
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in lines:
        cells = [line["logits"], str(line["vocab"]), str(line["rows"]), f"{line['bytes'] / bandwidth / 1e6:.1f}"]
        text.append("| " + " | ".join([*cells, *(f"{line['us'][n]:.1f}" for n in OPTIONS)]) + " |")
    return "\n".join(text)


def shapes() -> list[Shape]:
    """Launch constants worth comparing: each changes one thing."""
    base = Shape()
    w = base.warps
    return [
        base,
        replace(base, warps=(*w[:2], 4, *w[3:])),
        replace(base, chunk=32),
        replace(base, chunk=128),
        replace(base, tile=512),
        replace(base, part=256),
        replace(base, part=1024, warps=(*w[:5], 8, w[6])),
        replace(base, rays=8),
        replace(base, rays=8, part=1024),
    ]


def sweep(rows: tuple[int, ...], vocab: int, part: tuple[int, int], *, replays: int = 5) -> None:
    """Print the times of each of `shapes`, or of every part[1]-th from part[0] on."""
    names = ("greedy", "temperature", "top_p 0.9", "all")
    for count in rows:
        sets = max(2, min(16, math.ceil(COLD_BYTES / (count * vocab * 4))))
        model = [make_logits("model", count, vocab, torch.float32) for _ in range(sets)]
        flat = [make_logits("flat", count, vocab, torch.float32) for _ in range(2)]
        for shape in shapes()[part[0] :: part[1]]:
            try:
                gpu = GpuSampler(count, vocab, "cuda", shape=shape)
                times = [time_batches(gpu, OPTIONS[n], model, replays) for n in names]
                times.append(time_batches(gpu, OPTIONS["top_p 0.9"], flat, replays))
            except Exception as error:  # a launch that does not fit is a result too
                print(count, shape, type(error).__name__, str(error)[:80])
                continue
            print(
                f"{count:3d} block {shape.block} group {shape.group} warps {shape.warps} chunk {shape.chunk} tile "
                f"{shape.tile} rays {shape.rays} part {shape.part}: "
                + " ".join(f"{n} {t:.1f}" for n, t in zip((*names, "flat top_p"), times, strict=True)),
                flush=True,
            )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for sampler.json and sampler.md")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of a batch, by commas")
    parser.add_argument("--vocabs", default=",".join(map(str, VOCABS)), help="sizes of the vocabulary, by commas")
    parser.add_argument("--logits", default="model,flat", help="kinds of logits, by commas")
    parser.add_argument("--half", action="store_true", help="float16 logits")
    parser.add_argument("--sweep", action="store_true", help="compare launch constants instead")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th launch of the sweep from the i-th on")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/sampler.py needs a CUDA device")
    rows = tuple(int(n) for n in options.rows.split(","))
    vocabs = tuple(int(n) for n in options.vocabs.split(","))
    if options.sweep:
        for vocab in vocabs:
            first, every = options.part.split("/")
            sweep(rows, vocab, (int(first), int(every)))
        return
    bandwidth = copy_bandwidth()
    dtype = torch.float16 if options.half else torch.float32
    lines = measure(options.logits.split(","), rows, vocabs, dtype)
    text = table(lines, bandwidth)
    properties = torch.cuda.get_device_properties(0)
    result = {
        "gpu": properties.name, "sm": properties.major * 10 + properties.minor, "copy_tb_per_s": bandwidth,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "command": "python " + " ".join(sys.argv),
        "dtype": str(dtype), "lines": lines,
    }  # fmt: skip
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sampler.json").write_text(json.dumps(result, indent=1) + "\n")
        title = f"{properties.name}, copy {bandwidth:.2f} TB/s, {dtype}, microseconds"
        (options.out / "sampler.md").write_text(f"{title}\n\n{text}\n")
    print(f"copy {bandwidth:.2f} TB/s, {dtype}, microseconds\n{text}")


if __name__ == "__main__":
    main()

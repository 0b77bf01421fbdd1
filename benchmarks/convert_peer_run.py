"""One conversion by another library, in the environment where that library is installed.

    PYTHON benchmarks/convert_peer_run.py PEER SOURCE OUT WINDOWS.json --bits 4 --group-size 64 [--sym] [--device cuda]

PEER: autoawq, gptqmodel, llmcompressor-awq or llmcompressor-gptq. WINDOWS.json: the calibration windows as lists of
token ids. Needs nothing of qengine but this checkout; `convert_peers.py` calls it and scores what it writes. Prints, as
JSON, the seconds that the library's own quantizer took and the processor seconds of the whole process, its peaks of
memory and what versions it ran with.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = str(Path(__file__).resolve().parents[1])
CARD_BATCH = 8
"""Windows that llm-compressor's AWQ runs at once on a card, which its default of one would leave waiting."""
DISTRIBUTIONS = {
    "autoawq": ("autoawq",),
    "gptqmodel": ("gptqmodel",),
    "llmcompressor-awq": ("llmcompressor", "compressed-tensors"),
    "llmcompressor-gptq": ("llmcompressor", "compressed-tensors"),
}


def backend(args: argparse.Namespace, windows: list[list[int]]) -> float:
    """AutoAWQ or GPTQModel as `qengine convert --backend` runs them: float32 on a CPU, float16 on a card."""
    # On the path for these imports only: transformers takes any folder called `kernels` there for a package.
    sys.path.append(ROOT)
    from qengine.convert.backends import autoawq, gptqmodel
    from qengine.convert.backends.job import PeerJob

    sys.path.remove(ROOT)
    Path(args.out).mkdir()
    awq = args.peer == "autoawq"
    job = PeerJob(
        backend=args.peer,
        source=args.source,
        out=args.out,
        windows=windows,
        method="awq" if awq else "gptq",
        format="awq-gemm" if awq else "gptq",
        bits=args.bits,
        group_size=args.group_size,
        sym=args.sym,
        desc_act=False,
        device=args.device,
        seed=0,
    )
    return (autoawq if awq else gptqmodel).quantize(job)


def llmcompressor(args: argparse.Namespace, windows: list[list[int]]) -> float:
    """llm-compressor's AWQ or GPTQ, in float32; its layers go to a card by themselves where the process sees one."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.device == "cpu":
        IntermediatesCache.pin_memory = lambda self, *a, **k: None  # pinning needs a card
    weights = {"num_bits": args.bits, "type": "int", "symmetric": args.sym, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": args.group_size}}
    if args.peer == "llmcompressor-awq":
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        recipe = [AWQModifier(), QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])]
    else:
        from llmcompressor.modifiers.quantization import GPTQModifier

        recipe = [GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"])]
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32)
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(ids) for ids in windows]})
    started = time.monotonic()
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(args.source),
        dataset=data,
        recipe=recipe,
        max_seq_length=len(windows[0]),
        num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
        batch_size=args.batch or (CARD_BATCH if args.device != "cpu" and args.peer == "llmcompressor-awq" else 1),
    )
    seconds = time.monotonic() - started
    model.save_pretrained(args.out, save_compressed=True)
    return seconds


def usage(device: str) -> dict[str, Any]:
    """Processor seconds of this process and its peaks of memory in MiB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, Any] = {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
    }
    if device != "cpu":
        result["gpu_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return result


def main() -> None:
    """Convert once and print the time and the peaks of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(DISTRIBUTIONS))
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("windows")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--sym", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, help="llm-compressor: windows at once; default: 1, AWQ on a card 8")
    args = parser.parse_args()
    with open(args.windows, encoding="utf-8") as file:
        windows = json.load(file)
    run = backend if args.peer in ("autoawq", "gptqmodel") else llmcompressor
    seconds = run(args, windows)
    versions = {name: metadata.version(name) for name in (*DISTRIBUTIONS[args.peer], "torch", "transformers")}
    print(json.dumps({"seconds": round(seconds, 1), **usage(args.device), "versions": versions}))


if __name__ == "__main__":
    main()

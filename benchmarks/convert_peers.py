"""The converter beside AutoAWQ, GPTQModel and llm-compressor: one model, one calibration, one text, one run.

    tests/peers/make_converters.sh .venv-converters
    python benchmarks/convert_peers.py MODEL --envs .venv-converters --json benchmarks/results/convert_peers.json
    python benchmarks/convert_peers.py MODEL --envs .venv-converters --only qengine-awq autoawq --seeds 0 1 2

Every library gets the same windows of Moby-Dick (64 of 512 tokens unless --samples says otherwise, drawn by the seed)
and converts in a process of its own, one after the other, on the CPU. All results are scored by one program: perplexity
of the dequantized weights in float32 on the first 24 windows (--windows) of 2,048 tokens of the bundled evaluation
text. On 2 cores it takes hours; what is in the file of --json already is not repeated. `over` is the growth of the loss
over the source's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import open_checkpoint
from qengine.convert.calibration import (
    bundled_text,
    load_tokenizer,
    read_documents,
    sample_windows,
    start_tokens,
    tokenize,
)
from qengine.convert.evaluate import streamed_perplexity
from qengine.convert.run import convert_checkpoint

SAMPLES, LENGTH, WINDOWS, SEQ_LEN = 64, 512, 24, 2048


@dataclass(frozen=True)
class Way:
    """A library and a method. env: where it is installed; None is qengine. peer: its name in convert_peer_run.py."""

    name: str
    method: str
    env: str | None = None
    peer: str = ""
    sym: bool = False


WAYS = (
    Way("qengine-rtn", "rtn"),
    Way("qengine-awq", "awq"),
    Way("qengine-gptq", "gptq"),
    Way("qengine-best", "best"),
    Way("qengine-gptq-sym", "gptq", sym=True),
    Way("gptqmodel", "gptq", "gptqmodel", "gptqmodel"),
    Way("gptqmodel-sym", "gptq", "gptqmodel", "gptqmodel", sym=True),
    Way("llmcompressor-awq", "awq", "llmcompressor", "llmcompressor-awq"),
    Way("llmcompressor-gptq-sym", "gptq", "llmcompressor", "llmcompressor-gptq", sym=True),
    Way("autoawq", "awq", "autoawq", "autoawq"),
)
PEER_ENVIRONMENT = {
    "GPTQMODEL_CPU_WORKERS": "2",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def calibration(source: Path, seed: int, samples: int) -> torch.Tensor:
    """The windows that `convert_checkpoint` draws, int64 [samples, LENGTH]."""
    tokenizer = load_tokenizer(source)
    vocabulary = open_checkpoint(source).text_config()["vocab_size"]
    ids = tokenize(tokenizer, read_documents(None))
    return sample_windows(ids, samples, LENGTH, seed=seed, vocab_size=vocabulary, start=start_tokens(tokenizer))


def for_peers(source: Path, folder: Path) -> Path:
    """A copy of the source whose tokenizer class old versions of transformers know."""
    copy = folder / "source"
    shutil.copytree(source, copy)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return copy


def own(way: Way, source: Path, out: Path, seed: int, samples: int) -> dict[str, Any]:
    """Convert here, in a process of its own for the sake of its peak of memory."""
    command = [sys.executable, __file__, str(source), "--samples", str(samples)]
    command += ["--own", way.method, str(out), str(seed), str(int(way.sym))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way.name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def convert_own(source: Path, method: str, out: str, seed: int, sym: bool, samples: int) -> None:
    """What `own` starts."""
    options: dict[str, Any] = {} if method == "rtn" else {"samples": samples, "seq_len": LENGTH, "seed": seed}
    started = time.monotonic()
    convert_checkpoint(source, out, method=method, sym=sym, group_size=64, **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"seconds": round(time.monotonic() - started, 1), "peak_mib": peak}))


def other(way: Way, source: Path, out: Path, windows: Path, envs: Path) -> dict[str, Any]:
    """Convert with another library."""
    script = Path(__file__).with_name("convert_peer_run.py")
    command = [str(envs / str(way.env) / "bin" / "python"), str(script), way.peer, str(source), str(out), str(windows)]
    command += ["--sym"] if way.sym else []
    environment = {**os.environ, **PEER_ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{way.name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: result[key] for key in ("seconds", "peak_mib")}


def measure(way: Way, seed: int, args: argparse.Namespace, tokens: torch.Tensor, source_loss: float) -> dict[str, Any]:
    """One conversion and its score."""
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        folder = Path(scratch)
        if way.env is None:
            took = own(way, args.model, folder / "out", seed, args.samples)
        else:
            windows = folder / "windows.json"
            windows.write_text(json.dumps(calibration(args.model, seed, args.samples).tolist()), encoding="utf-8")
            took = other(way, for_peers(args.model, folder), folder / "out", windows, args.envs)
        value = streamed_perplexity(open_checkpoint(folder / "out"), tokens, torch.device("cpu"))
    over = round(math.log(value) - source_loss, 5)
    return {"way": way.name, "seed": seed, "perplexity": round(value, 4), "over": over, **took}


def main() -> None:
    """Fill the table up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with plain weights")
    parser.add_argument("--envs", type=Path, help="what make_converters.sh made")
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration windows")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of the evaluation text")
    parser.add_argument("--json", type=Path, help="the table's file, taken up where it is")
    parser.add_argument("--work", type=Path, help="folder for conversions; default: the system's")
    parser.add_argument("--own", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        method, out, seed, sym = args.own
        convert_own(args.model, method, out, int(seed), sym == "1", args.samples)
        return
    ids = load_tokenizer(args.model)(bundled_text("evaluation.txt"), add_special_tokens=False, verbose=False)
    tokens = torch.tensor(ids["input_ids"][: args.windows * SEQ_LEN]).reshape(args.windows, SEQ_LEN)
    table: dict[str, Any] = {"model": str(args.model), "rows": []}
    if args.json and args.json.is_file():
        table = json.loads(args.json.read_text(encoding="utf-8"))
    if "source_perplexity" not in table:
        value = streamed_perplexity(open_checkpoint(args.model), tokens, torch.device("cpu"))
        table["source_perplexity"] = round(value, 4)
    there = {(row["way"], row["seed"]) for row in table["rows"]}
    for seed in args.seeds:
        for way in WAYS:
            if (way.name, seed) in there or way.name not in (args.only or [w.name for w in WAYS]):
                continue
            row = measure(way, seed, args, tokens, math.log(table["source_perplexity"]))
            table["rows"].append(row)
            print(row, flush=True)
            if args.json:
                args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

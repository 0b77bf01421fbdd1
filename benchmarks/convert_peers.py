"""The converter beside AutoAWQ, GPTQModel and llm-compressor: one model, one calibration, one text, one run.

    tests/peers/make_converters.sh .venv-converters
    python benchmarks/convert_peers.py MODEL --envs .venv-converters --json benchmarks/results/convert_peers.json
    python benchmarks/convert_peers.py MODEL --envs .venv-converters --only qengine-awq autoawq --seeds 0 1 2
    python benchmarks/convert_peers.py MODEL --envs .venv-converters --device cuda --jobs 4
    python benchmarks/convert_peer_table.py benchmarks/results/convert_peers.json

Every library gets the same windows of Moby-Dick (64 of 512 tokens unless --samples says otherwise, drawn by the seed)
and converts with its defaults in a process of its own, on the CPU unless --device says cuda. All results are scored by
one program: perplexity of the dequantized weights in float32 on the first 24 windows (--windows) of 2,048 tokens of the
bundled evaluation text. On 2 cores it takes hours; what is in the file of --json already is not repeated. `increase` is
the perplexity over that of the source, `over` the growth of the loss. `seconds` of a peer are those of its quantizer,
without loading and saving; ours are those of the whole conversion. With --jobs, which runs several conversions at
once, seconds compare nothing; `jobs` is in each row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from convert_peer_run import usage
from convert_peer_table import compare, markdown, summary

from qengine.bench.about import commit, versions
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
    Way("llmcompressor-gptq", "gptq", "llmcompressor", "llmcompressor-gptq"),
    Way("llmcompressor-gptq-sym", "gptq", "llmcompressor", "llmcompressor-gptq", sym=True),
    Way("autoawq", "awq", "autoawq", "autoawq"),
)
PEER_ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def calibration(source: Path, seed: int, samples: int) -> torch.Tensor:
    """The windows that `convert_checkpoint` draws, int64 [samples, LENGTH]."""
    ids, start = calibration_ids(source)
    vocabulary = open_checkpoint(source).text_config()["vocab_size"]
    return sample_windows(ids, samples, LENGTH, seed=seed, vocab_size=vocabulary, start=start)


@cache
def calibration_ids(source: Path) -> tuple[torch.Tensor, list[int]]:
    """The bundled text's tokens, and those that begin every window. Cached: they take seconds."""
    tokenizer = load_tokenizer(source)
    return tokenize(tokenizer, read_documents(None)), start_tokens(tokenizer)


def for_peers(source: Path, folder: Path) -> Path:
    """A copy of the source whose tokenizer class old versions of transformers know."""
    copy = folder / "source"
    shutil.copytree(source, copy)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return copy


def run(name: str, command: list[str], environment: dict[str, str], card: str) -> dict[str, Any]:
    """The JSON in the last line that a command prints; it sees no card but `card`, none on a CPU."""
    environment = {**environment, "CUDA_VISIBLE_DEVICES": card}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def own(way: Way, out: Path, seed: int, args: argparse.Namespace, card: str) -> dict[str, Any]:
    """Convert here, in a process of its own for the sake of its peak of memory."""
    command = [sys.executable, __file__, str(args.model), "--samples", str(args.samples), "--device", args.device]
    command += ["--own", way.method, str(out), str(seed), str(int(way.sym))]
    return run(way.name, command, dict(os.environ), card)


def convert_own(args: argparse.Namespace) -> None:
    """What `own` starts."""
    method, out, seed, sym = args.own
    drawn = {"samples": args.samples, "seq_len": LENGTH, "seed": int(seed)}
    options: dict[str, Any] = {} if method == "rtn" else drawn
    started = time.monotonic()
    convert_checkpoint(args.model, out, method=method, sym=sym == "1", group_size=64, device=args.device, **options)
    print(json.dumps({"seconds": round(time.monotonic() - started, 1), **usage(args.device)}))


def other(way: Way, folder: Path, seed: int, args: argparse.Namespace, card: str) -> dict[str, Any]:
    """Convert with another library to folder/out."""
    windows, source = folder / "windows.json", for_peers(args.model, folder)
    windows.write_text(json.dumps(calibration(args.model, seed, args.samples).tolist()), encoding="utf-8")
    python, script = args.envs / str(way.env) / "bin" / "python", Path(__file__).with_name("convert_peer_run.py")
    command = [str(python), str(script), way.peer, str(source), str(folder / "out"), str(windows)]
    command += ["--device", args.device, *(["--sym"] if way.sym else [])]
    environment = {**os.environ, **PEER_ENVIRONMENT}
    environment.pop("PYTHONPATH", None)  # may name this checkout: see convert_peer_run.py
    return run(way.name, command, environment, card)


def measure(way: Way, seed: int, args: argparse.Namespace, tokens: torch.Tensor, source: float) -> dict[str, Any]:
    """One conversion and its score; source: the source's perplexity."""
    number = args.free_cards.get()
    try:
        with tempfile.TemporaryDirectory(dir=args.work) as scratch:
            folder = Path(scratch)
            if way.env is None:
                took = own(way, folder / "out", seed, args, args.cards[number])
            else:
                took = other(way, folder, seed, args, args.cards[number])
            device = torch.device(args.device, number) if args.device == "cuda" else torch.device("cpu")
            value = streamed_perplexity(open_checkpoint(folder / "out"), tokens, device)
    finally:
        args.free_cards.put(number)
    row = {"way": way.name, "seed": seed, "perplexity": round(value, 4), "increase": round(value - source, 4)}
    over = {"over": round(math.log(value / source), 5)}
    return {**row, **over, **took, "jobs": args.jobs, "threads": torch.get_num_threads(), "commit": commit()}


def find_cards(args: argparse.Namespace) -> None:
    """args.cards: what CUDA_VISIBLE_DEVICES calls each; args.free_cards: numbers of cards, a place for each job."""
    args.cards, args.free_cards = [""], SimpleQueue()
    if args.device == "cuda":
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        args.cards = named.split(",")
    for job in range(args.jobs):
        args.free_cards.put(job % len(args.cards))


def machine(device: str) -> str:
    """The card's name, or the processor's and how many of them."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0].partition(':')[2].strip() if names else platform.processor()}"


def begin(args: argparse.Namespace, tokens: torch.Tensor) -> dict[str, Any]:
    """The table as it is in the file, or a new one with the source's score."""
    if args.json and args.json.is_file():
        table: dict[str, Any] = json.loads(args.json.read_text(encoding="utf-8"))
        if (table["device"], table["samples"]) != (args.device, args.samples):
            raise SystemExit(f"{args.json}: was made with other settings; give another file")
        return table
    value = streamed_perplexity(open_checkpoint(args.model), tokens, torch.device(args.device))
    about = {"command": shlex.join(sys.argv), "commit": commit(), "versions": versions()}
    about |= {"device": args.device, "machine": machine(args.device), "model": args.model.name}
    about |= {"bits": 4, "group_size": 64, "samples": args.samples, "length": LENGTH}
    about |= {"calibration": "bundled calibration.txt", "text": "bundled evaluation.txt"}
    return {**about, "windows": args.windows, "seq_len": SEQ_LEN, "source_perplexity": round(value, 4), "rows": []}


def save(table: dict[str, Any], path: Path | None) -> None:
    """The rows in the order of WAYS, and what they come to."""
    order = [way.name for way in WAYS]
    table["rows"].sort(key=lambda row: (order.index(row["way"]), row["seed"]))
    table |= {"summary": summary(table["rows"]), "bars": compare(table["rows"])}
    if path:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def fill(table: dict[str, Any], args: argparse.Namespace, tokens: torch.Tensor) -> bool:
    """Add the rows that are wanted and not there. Whether all succeeded."""
    there = {(row["way"], row["seed"]) for row in table["rows"]}
    names = {way.name: way for way in WAYS}
    ways = [names[name] for name in args.only or names]
    # Round-to-nearest has no calibration.
    todo = [(way, seed) for seed in args.seeds for way in ways if way.method != "rtn" or seed == args.seeds[0]]
    good = True
    calibration_ids(args.model)
    with ThreadPoolExecutor(args.jobs) as pool:
        source = table["source_perplexity"]
        jobs = [pool.submit(measure, w, s, args, tokens, source) for w, s in todo if (w.name, s) not in there]
        for job in as_completed(jobs):
            try:
                table["rows"].append(job.result())
            except Exception as error:  # a peer may write anything: the other rows are worth having
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                good = False
                continue
            print(table["rows"][-1], flush=True)
            save(table, args.json)
    return good


def main() -> None:
    """Fill the table up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with plain weights")
    parser.add_argument("--envs", type=Path, help="what make_converters.sh made")
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS], help="in this order")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration windows")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of the evaluation text")
    parser.add_argument("--json", type=Path, help="the table's file, taken up where it is")
    parser.add_argument("--work", type=Path, help="folder for conversions; default: the system's")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu", help="of conversions and scores")
    parser.add_argument("--jobs", type=int, default=1, help="conversions at once, shared out over the cards")
    parser.add_argument("--own", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.own:
        convert_own(args)
        return
    find_cards(args)
    ids = load_tokenizer(args.model)(bundled_text("evaluation.txt"), add_special_tokens=False, verbose=False)
    tokens = torch.tensor(ids["input_ids"][: args.windows * SEQ_LEN]).reshape(args.windows, SEQ_LEN)
    table = begin(args, tokens)
    good = fill(table, args, tokens)
    save(table, args.json)
    print(markdown(table))
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

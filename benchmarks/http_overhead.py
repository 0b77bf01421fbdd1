"""What HTTP costs: the same requests to the engine directly and through `qengine serve`, in turn, in one run.

    python benchmarks/http_overhead.py --shape llama-2-7b --memory-gib 14.6 --name http_overhead_h200
    python benchmarks/http_overhead.py --shape tiny --device cpu --rounds 5 --name http_overhead_cpu

Both hold the same random model with the same settings, each in a process of its own, and both make text: the tokenizer
is a byte-level BPE of the model's vocabulary size, made here. Three things run in turn, a round each: LLM.generate,
AsyncLLM with a task a stream, and the server with an HTTP client in this process. A round is 32 streams at once; then
single requests to an idle engine, and single requests beside 31 streams, are timed to their first token. The report
has every round; the bars are at least 97 % of AsyncLLM's rate and at most 2 ms more to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from http_overhead_sides import DirectProcess, Http, Loads, run_round, settled

from qengine.bench.serve.client import Client
from qengine.bench.serve.options import LoadOptions
from qengine.bench.serve.process import running_server
from qengine.bench.serve.run import warm_up

RESULTS = Path(__file__).parent / "results"
RATE_BAR, FIRST_BAR_MS = 0.97, 2.0


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level BPE tokenizer of so many tokens, nearly all of them 2 or 4 letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters]
    merges = (pairs + [(a + b, c + d) for a, b in pairs for c, d in pairs[:40]])[: vocabulary - len(symbols)]
    vocab = {token: index for index, token in enumerate([*symbols, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!").save_pretrained(folder)


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """The settings as `qengine serve` takes them."""
    found = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found


async def http_rounds(base: str, loads: Loads, numbers: list[int], each: Any) -> None:
    """Rounds over HTTP; `each` gets the number and the round, and may run something between them."""
    options = LoadOptions(base_url=base, timeout=600)
    async with Client(options) as client:
        client.options = replace(options, model=str((await client.models())[0]["id"]))
        await warm_up(client, loads.jobs("streams", -1))
        print(f"the server rests after {await settled(Http(client)):.1f} s", file=sys.stderr, flush=True)
        await run_round(Http(client), loads, -2)
        for number in numbers:
            each(number, await run_round(Http(client), loads, number))


def compare(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures that the bars are about: medians over the rounds."""

    def rate(name: str) -> float:
        return statistics.median(one["tokens_per_s"] for one in rounds[name])

    def first(name: str, key: str) -> float:
        values = [one[key] if isinstance(one[key], list) else [one[key]] for one in rounds[name]]
        return statistics.median(value for one in values for value in one)

    found: dict[str, Any] = {
        "tokens_per_s": {name: rate(name) for name in rounds},
        "http_share_of_async": rate("http") / rate("async"),
        "http_share_of_generate": rate("http") / rate("generate"),
    }
    found["cpu_us_per_token"] = {
        name: statistics.median(one["cpu_us_per_token"] for one in rounds[name]) for name in ("async", "http")
    }
    for key in ("first_ms_idle", "first_ms_beside_streams", "first_ms_all_at_once"):
        found[key] = {name: first(name, key) for name in ("async", "http")}
        found[f"more_{key}"] = found[key]["http"] - found[key]["async"]
    found["bars"] = {
        "rate": found["http_share_of_async"] >= RATE_BAR,
        "first_token_idle": found["more_first_ms_idle"] <= FIRST_BAR_MS,
        "first_token_beside_streams": found["more_first_ms_beside_streams"] <= FIRST_BAR_MS,
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-2-7b", help="a name of qengine.random_model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory-gib", type=float, help="most GPU memory of each process")
    parser.add_argument("--num-blocks", type=int, help="cache blocks instead of what the memory holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--singles", type=int, default=10, help="requests that are timed to their first token, a round")
    parser.add_argument("--single-input-len", type=int, default=128)
    parser.add_argument("--serve-args", default="", help="more options for the server, in one string")
    parser.add_argument("--name", default="http_overhead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}.json"
    result = run(options, path)
    print(json.dumps(result, indent=2))
    print(f"written: {path}", file=sys.stderr)
    return 0 if all(result["bars"].values()) else 1


def run(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Both processes, the rounds in turn; the report is written after each, its result is returned."""
    from qengine.random_model import PREFIX, shape_config

    vocabulary = int(shape_config(options.shape)["vocab_size"])
    sizes = {
        "streams": options.streams, "in": options.input_len, "out": options.output_len, "singles": options.singles,
        "single_in": options.single_input_len,
    }  # fmt: skip
    loads = Loads(sizes, vocabulary)
    rounds: dict[str, list[dict[str, Any]]] = {"generate": [], "async": [], "http": []}
    with tempfile.TemporaryDirectory(prefix="qengine-http-") as folder:
        write_tokenizer(Path(folder), vocabulary)
        settings = {
            "tokenizer": folder, "device": options.device, "dtype": options.dtype, "swap_space": 0.0,
            "kv_cache_dtype": options.kv_cache_dtype, "gpu_memory_limit": options.memory_gib, "max_model_len": 2048,
            "enable_prefix_caching": False, "num_gpu_blocks_override": options.num_blocks,
        }  # fmt: skip
        settings = {name: value for name, value in settings.items() if value is not None}
        model = PREFIX + options.shape
        direct = DirectProcess({"model": model, "settings": settings, "sizes": sizes, "vocabulary": vocabulary})

        def each(number: int, found: dict[str, Any]) -> None:
            rounds["http"].append(found)
            for kind in ("async", "generate"):
                rounds[kind].append(direct.round(kind, number))
            line = {kind: round(rounds[kind][-1]["tokens_per_s"], 1) for kind in rounds}
            print(f"round {number}: {line}", file=sys.stderr, flush=True)
            report = head | {"result": compare(rounds), "rounds": rounds}
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

        head = describe(options, model, settings, sizes)
        serve_args = [*arguments_of(settings), *options.serve_args.split()]
        try:
            with running_server(model, serve_args) as base:
                direct.wait_until_ready()
                asyncio.run(http_rounds(base, loads, list(range(options.rounds)), each))
        finally:
            direct.close()
    return compare(rounds)


def describe(
    options: argparse.Namespace, model: str, settings: dict[str, Any], sizes: dict[str, int]
) -> dict[str, Any]:
    """What the figures depend on."""
    from qengine.bench.about import commit, versions

    return {
        "benchmark": "http_overhead",
        "model": model,
        "settings": {name: value for name, value in settings.items() if name != "tokenizer"},
        "serve_args": options.serve_args,
        "sizes": sizes,
        "card": card(),
        "cpus": os.cpu_count(),
        "versions": {**versions(), **server_versions()},
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def card() -> str | None:
    """The GPU's name, None without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def server_versions() -> dict[str, str | None]:
    """Of what serves; None where it is not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in ("fastapi", "uvicorn", "uvloop", "httptools", "aiohttp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())

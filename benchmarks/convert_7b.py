"""A model of 7B's shape with random float16 weights, converted on a GPU: time and peaks of memory.

    python benchmarks/convert_7b.py                       # makes the model (13.5 GB), converts with awq and with gptq
    python benchmarks/convert_7b.py --layers 4 --json     # a first look
    python benchmarks/convert_7b.py --layers 2 --phases   # where a layer's time and memory go
    python benchmarks/convert_7b.py --shape qwen2.5-14b --layers 2

Each conversion is a process of its own. Its peaks: VmHWM of the process, torch's allocated and reserved memory, and all
of the card's memory, by NVML if it answers or else the driver, less what was used before it started.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from qengine.bench.about import commit, versions
from qengine.checkpoint.writer import Entry, write_json, write_shards
from qengine.random_model import SHAPES

METHODS = ("awq", "gptq")


def plain_entries(config: dict[str, Any]) -> list[Entry]:
    """Every tensor of the float16 checkpoint."""
    hidden, inner, half = config["hidden_size"], config["intermediate_size"], torch.float16
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    biases = ("q_proj", "k_proj", "v_proj") if config["model_type"] == "qwen2" else ()
    entries = [Entry("model.embed_tokens.weight", half, (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        entries += [Entry(f"{start}{name}.weight", half, shape) for name, shape in shapes.items()]
        entries += [Entry(f"{start}{n}.bias", half, shapes[n][:1]) for n in shapes if n.endswith(biases or ("!",))]
    entries.append(Entry("model.norm.weight", half, (hidden,)))
    if not config["tie_word_embeddings"]:
        entries.append(Entry("lm_head.weight", half, (config["vocab_size"], hidden)))
    return entries


def random_plain(entry: Entry, device: str) -> torch.Tensor:
    """Weights of a trained model's variance; a few input channels of each norm are large, as in trained ones."""
    if "norm" in entry.name:
        values = torch.ones(entry.shape)
        values[:: entry.shape[0] // 16] = 8.0
        return values.to(entry.dtype)
    values = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    std = 1.0 if "embed" in entry.name else entry.shape[-1] ** -0.5
    return values.normal_(std=std).cpu()


def make_model(folder: Path, shape: str, layers: int | None, device: str) -> None:
    """The checkpoint, with a tokenizer of bytes."""
    config = {**SHAPES[shape], "torch_dtype": "float16"}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    entries = plain_entries(config)
    table = {entry.name: entry for entry in entries}
    torch.manual_seed(0)
    write_shards(folder, entries, lambda name: random_plain(table[name], device))
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class CardPeak:
    """The most memory that the card had in use while the block ran, in MiB over what it had before; None unknown."""

    def __enter__(self) -> CardPeak:
        """Start to look, ten times a second."""
        self.mib: float | None = None
        self.source: str | None = None
        self._stop = threading.Event()
        if not torch.cuda.is_available():
            return self
        self._nvml = None
        with suppress(Exception):  # no library, no permission: each has a class of its own
            import pynvml

            pynvml.nvmlInit()
            # by its identity: NVML knows nothing of CUDA_VISIBLE_DEVICES
            uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        self.source = "driver" if self._nvml is None else "nvml"
        base = self._used()
        self.mib = 0.0
        self._thread = threading.Thread(target=self._watch, args=(base,), daemon=True)
        self._thread.start()
        return self

    def _used(self) -> float:
        if self._nvml is None:
            free, total = torch.cuda.mem_get_info()
            return (total - free) / 2**20
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / 2**20

    def _watch(self, base: float) -> None:
        while not self._stop.wait(0.1):
            self.mib = max(self.mib or 0.0, self._used() - base)

    def __exit__(self, *_: object) -> None:
        """Stop looking."""
        self._stop.set()


def child(method: str, source: str, out: str, device: str, samples: int, phases: bool) -> None:
    """Convert in this process and print what it took."""
    from qengine.convert.phases import PhaseClock
    from qengine.convert.run import convert_checkpoint

    clock, at = PhaseClock(), []
    started = time.monotonic()
    with clock.recording() if phases else nullcontext():
        report = convert_checkpoint(
            source,
            out,
            method=method,
            device=device,
            samples=samples,
            sym=method == "gptq",
            progress=lambda done, total: at.append(round(time.monotonic() - started, 2)),
        )
    seconds = time.monotonic() - started
    costs = {
        name: [round(cost.seconds, 3), cost.count, cost.allocated >> 20, cost.reserved >> 20]
        for name, cost in clock.costs.items()
    }
    status = Path("/proc/self/status").read_text()
    lines = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")}
    cuda = torch.cuda.is_available() and device != "cpu"

    def peak(last: Callable[[], int], column: int) -> int:
        """MiB; a clock that recorded has begun the allocator's own peaks anew at each phase."""
        return int(max([last() >> 20, *(cost[column] for cost in costs.values())]))

    print(
        json.dumps(
            {
                "seconds": round(seconds, 1),
                "ram_mib": int(lines["VmHWM"]) // 1024,
                "torch_allocated_mib": peak(torch.cuda.max_memory_allocated, 2) if cuda else None,
                "torch_reserved_mib": peak(torch.cuda.max_memory_reserved, 3) if cuda else None,
                "layers_done_at": at,
                "phases": costs,
                "errors": {k: v.get("error") for k, v in report.errors_by_kind().items()},
                "rtn_errors": {k: v.get("rtn_error") for k, v in report.errors_by_kind().items()},
                "warnings": report.warnings,
            }
        )
    )


def measure(method: str, args: argparse.Namespace, source: Path) -> dict[str, Any]:
    """One conversion in a process of its own."""
    out = args.work / f"out-{method}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--child", method, str(source), str(out)]
    command += ["--device", args.device, "--samples", str(args.samples), *(["--phases"] if args.phases else [])]
    with CardPeak() as card:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    shutil.rmtree(out, ignore_errors=True)
    return {"method": method, "card_mib": card.mib and round(card.mib), "card_by": card.source, **result}


def main() -> None:
    """Make the model, convert it, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("/tmp/convert-7b"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--phases", action="store_true", help="seconds and peaks by phase; adds waits for the device")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args.device, args.samples, args.phases)
        return
    source = args.work / f"{args.shape}-{args.layers or 'all'}"
    if not (source / "config.json").is_file():
        started = time.monotonic()
        make_model(source, args.shape, args.layers, args.device)
        print(f"made {source} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    rows = []
    for method in args.methods:
        rows.append(measure(method, args, source))
        print(json.dumps(rows[-1]), file=sys.stderr)  # so that a run cut short has said something
    name = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    result = {
        "shape": args.shape, "layers": args.layers, "device": name, "samples": args.samples, "commit": commit(),
        "versions": versions(), "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), "rows": rows,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.shape}, {args.layers or 'all'} layers, {args.samples} windows of 512 tokens, {name}")
    for row in rows:
        vram = f"card {row['card_mib']} MiB, torch {row['torch_reserved_mib']} MiB reserved, "
        print(f"{row['method']}: {row['seconds']} s, {vram}RAM {row['ram_mib']} MiB")
        for phase, (seconds, count, allocated, reserved) in row["phases"].items():
            print(f"  {phase:30} {seconds:8.3f} s {count:6} times, {allocated:6} MiB allocated, {reserved:6} reserved")


if __name__ == "__main__":
    main()

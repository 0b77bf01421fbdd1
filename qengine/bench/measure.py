"""Runs loads on an LLM and takes their times, as plain rows."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qengine.bench.loads import Load
from qengine.errors import QEngineError
from qengine.outputs import RequestOutput
from qengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qengine.async_llm import AsyncLLM
    from qengine.llm import LLM


@dataclass
class Row:
    """One load's figures. seconds: of each run, in order. Rates are of the median run, output tokens over its time.

    ttft_ms, tpot_ms: median and 99th percentile over the requests of all runs, from arrival to the first token, and
    between tokens. preemptions: of the last run. predicted_tokens_per_s: output tokens by the
    cost model. tokens: of the last run, request by request (not written out).
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: list[float]
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float] | None
    preemptions: int = 0
    predicted_tokens_per_s: float | None = None
    note: str = ""
    tokens: list[list[int]] = field(default_factory=list, repr=False)

    def as_json(self) -> dict[str, Any]:
        """All but the tokens."""
        return {key: value for key, value in asdict(self).items() if key != "tokens"}


def run_load(llm: LLM, runs: Sequence[Load]) -> Row:
    """Run the load's runs one after the other with `llm.generate`."""
    seconds, outputs = [], []
    for load in runs:
        prompts, params = requests_of(load)
        start = time.perf_counter()
        outputs.append(llm.generate(prompts, params, use_tqdm=False))
        seconds.append(time.perf_counter() - start)
    return make_row(runs, seconds, outputs)


async def run_async(llm: AsyncLLM, runs: Sequence[Load]) -> Row:
    """As `run_load`, each request a task of its own that takes every output."""

    async def one(prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in llm.generate(prompt, params):
            last = output
        assert last is not None, "a request yields at least once"
        return last

    seconds, outputs = [], []
    for load in runs:
        prompts, params = requests_of(load)
        start = time.perf_counter()
        outputs.append(list(await asyncio.gather(*map(one, prompts, params))))
        seconds.append(time.perf_counter() - start)
    return make_row(runs, seconds, outputs)


def requests_of(load: Load) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts and parameters: greedy, exactly as many tokens as asked for, no text."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in load.prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in load.outputs
    ]
    return prompts, params


def make_row(runs: Sequence[Load], seconds: list[float], outputs: list[list[RequestOutput]]) -> Row:
    """The figures of finished runs. Raises QEngineError if a request did not get all its tokens."""
    load = runs[-1]
    for done, asked in zip(outputs, runs, strict=True):
        counts = [len(output.outputs[0].token_ids) for output in done]
        if counts != list(asked.outputs):
            wrong = sum(a != b for a, b in zip(counts, asked.outputs, strict=True))
            raise QEngineError(f"{load.name}: {wrong} of {len(counts)} requests did not get the tokens asked for")
    typical = statistics.median(seconds)
    metrics = [output.metrics for done in outputs for output in done if output.metrics is not None]
    first = [1e3 * (m.first_token_time - m.arrival_time) for m in metrics if m.first_token_time is not None]
    counts = [count for asked in runs for count in asked.outputs]
    between = [
        1e3 * (m.finished_time - m.first_token_time) / (count - 1)
        for m, count in zip(metrics, counts, strict=True)
        if count > 1 and m.finished_time is not None and m.first_token_time is not None
    ]
    return Row(
        name=load.name,
        requests=len(load.prompts),
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        seconds=seconds,
        output_tokens_per_s=load.output_tokens / typical,
        total_tokens_per_s=(load.output_tokens + load.prompt_tokens) / typical,
        ttft_ms=percentiles(first),
        tpot_ms=percentiles(between) if between else None,
        preemptions=sum(output.metrics.num_preemptions for output in outputs[-1] if output.metrics is not None),
        tokens=[output.outputs[0].token_ids for output in outputs[-1]],
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile (the nearest value at or above it)."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}

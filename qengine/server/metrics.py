"""What the server counts: requests as their callers see them, and the engine's own counts, for /metrics and /stats.

The event loop calls `begin`, `output`, `end` and `error`; they add to plain numbers. The engine's counts come from the
snapshot that its thread publishes, so a scrape waits for no step. Names follow vLLM's with the prefix `qengine:`; the
table is in `exposition.py`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import generate_latest as render

from qengine.async_llm import RequestOutputKind
from qengine.server.exposition import Exposition
from qengine.server.gpu_metrics import GpuReader, GpuReading
from qengine.server.live import live_view
from qengine.server.tallies import Rate, Tally

if TYPE_CHECKING:
    from qengine.async_llm import AsyncLLM
    from qengine.engine.stats import EngineStats
    from qengine.outputs import RequestMetrics, RequestOutput

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Bounds of the histograms: seconds, as vLLM's, and tokens."""
RECENT = 20
"""Requests that the page lists."""
SUCCESSES = ("stop", "length", "tool_calls")
"""Ends that are counted as a success; the others are "abort" and "error"."""


@dataclass(frozen=True)
class Facts:
    """What does not change while a model is loaded: bytes of weights, cache and CPU tier, and labels for the infos."""

    weight_bytes: int
    cache_bytes: int
    swap_bytes: int
    labels: dict[str, str]


class RequestRecord:
    """One prompt given to the engine, from its arrival at the server to its end. Made by `ServerMetrics.begin`.

    begun, ended: seconds of time.monotonic(). wall_time: seconds since the epoch. reason: how it ended.
    """

    __slots__ = (
        "_counts", "_cumulative", "_last", "_parent", "_timing", "begun", "ended", "endpoint", "first_token_seconds",
        "output_tokens", "prompt_tokens", "reason", "request_id", "wall_time",
    )  # fmt: skip

    def __init__(self, parent: ServerMetrics, endpoint: str, cumulative: bool, request_id: str | None) -> None:
        self._parent = parent
        self._cumulative = cumulative
        self._counts: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._timing: RequestMetrics | None = None
        self.endpoint = endpoint
        self.request_id = request_id
        self.begun, self.wall_time = time.monotonic(), time.time()
        self.ended: float | None = None
        self.reason: str | None = None
        self.first_token_seconds: float | None = None
        self.prompt_tokens = 0
        self.output_tokens = 0

    def output(self, output: RequestOutput) -> None:
        """Count what an output of the engine brings. Call it for each, in order."""
        now, parent = time.monotonic(), self._parent
        self._timing = output.metrics or self._timing
        if not self.prompt_tokens and output.prompt_token_ids:
            self.request_id = self.request_id or output.request_id
            self.prompt_tokens = len(output.prompt_token_ids)
            parent.count_prompt(self.prompt_tokens, now)
        for choice in output.outputs:
            index, count = choice.index, len(choice.token_ids)
            before = self._counts.get(index, 0)
            count -= before if self._cumulative else 0
            if not count:
                continue
            self._counts[index] = before + count
            last = self._last.get(index)
            if last is not None:
                parent.between.add((now - last) / count, count)
            self._last[index] = now
            if self.first_token_seconds is None:
                self._first_token(now)
            self.output_tokens += count
            parent.count_output(count, now)

    def _first_token(self, now: float) -> None:
        """By the engine's clock, which is the same: an answer that is not streamed arrives as a whole."""
        engine = self._timing.first_token_time if self._timing is not None else None
        self.first_token_seconds = (engine or now) - self.begun
        self._parent.first_token.add(self.first_token_seconds)

    def end(self, reason: str) -> None:
        """The request is over: "stop", "length", "tool_calls", "abort" or "error". Later calls change nothing."""
        if self.reason is None:
            self.reason, self.ended = reason, time.monotonic()
            self._parent.ended(self)

    def error(self, kind: str, status: int) -> None:
        """Count an error of this request, and end it; as `ServerMetrics.error`."""
        self._parent.error(kind, status)
        self.end("error")

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self._counts.values(), default=0)

    @property
    def timing(self) -> RequestMetrics | None:
        """The engine's times, as far as it told them."""
        return self._timing


class ServerMetrics:
    """The server's counts, and the engine's, over one AsyncLLM. For the event loop that serves requests.

    registry: where the metrics are registered; None makes one, with the process's own metrics beside. model_name: the
    label `model_name`; None for the name that the model was loaded by.
    """

    def __init__(
        self, llm: AsyncLLM, registry: CollectorRegistry | None = None, *, model_name: str | None = None
    ) -> None:
        self._llm = llm
        self._given_name = model_name
        self._facts: Facts | None = None
        self._gpu: GpuReader | None = None
        self.started = time.monotonic()
        self.first_token, self.between, self.whole = Tally(FIRST), Tally(BETWEEN), Tally(WHOLE)
        self.per_output_token = Tally(BETWEEN)
        self.queued, self.prefill, self.decode = Tally(WHOLE), Tally(WHOLE), Tally(WHOLE)
        self.prompt_sizes, self.output_sizes = Tally(TOKENS), Tally(TOKENS)
        self.prompt_tokens = self.output_tokens = self.aborts = 0
        self.prompt_rate, self.output_rate = Rate(), Rate()
        self.requests: Counter[str] = Counter()
        self.successes: Counter[str] = Counter(dict.fromkeys(SUCCESSES, 0))
        self.errors: Counter[tuple[str, int]] = Counter()
        self.recent: deque[RequestRecord] = deque(maxlen=RECENT)
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            GCCollector(registry=registry)
        self.registry = registry
        registry.register(Exposition(self))

    # Called while requests are served.

    def begin(
        self,
        endpoint: str,
        *,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        request_id: str | None = None,
    ) -> RequestRecord:
        """A prompt has arrived.

        kind: of the engine's outputs; those of FINAL_ONLY may be counted as DELTA. request_id: shown on the page; None
        for the engine's.
        """
        self.requests[endpoint] += 1
        record = RequestRecord(self, endpoint, kind is RequestOutputKind.CUMULATIVE, request_id)
        self.recent.append(record)
        return record

    def error(self, kind: str, status: int) -> None:
        """A request was answered with an error. kind: its type, as in the answer; status: of HTTP."""
        self.errors[kind, status] += 1

    def count_prompt(self, tokens: int, now: float) -> None:
        """A prompt of so many tokens was taken."""
        self.prompt_tokens += tokens
        self.prompt_rate.add(tokens, now)
        self.prompt_sizes.add(tokens)

    def count_output(self, tokens: int, now: float) -> None:
        """So many tokens were generated."""
        self.output_tokens += tokens
        self.output_rate.add(tokens, now)

    def ended(self, record: RequestRecord) -> None:
        """Count an end and the times of the whole request."""
        assert record.ended is not None, "only called with the end's time"
        if record.reason == "abort":
            self.aborts += 1
        elif record.reason != "error":
            self.successes[str(record.reason)] += 1
            self.whole.add(record.ended - record.begun)
            self.output_sizes.add(record.output_tokens)
        times = record.timing
        if times is None or times.first_scheduled_time is None:
            return
        self.queued.add(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None:
            return
        self.prefill.add(times.first_token_time - times.first_scheduled_time)
        if times.finished_time is not None:
            spent = times.finished_time - times.first_token_time
            self.decode.add(spent)
            if record.longest > 1:
                self.per_output_token.add(spent / (record.longest - 1))

    # Read by a scrape and by the page.

    def text(self) -> tuple[bytes, str]:
        """(body, content type) of GET /metrics."""
        return render(self.registry), CONTENT_TYPE_LATEST

    def live(self) -> dict[str, Any]:
        """The body of GET /stats: see `live.live_view`."""
        return live_view(self)

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests."""
        return self._llm.is_running and not self._llm.errored

    @property
    def model_name(self) -> str:
        """The label `model_name`."""
        facts = self.facts()
        return self._given_name or (facts.labels["model"] if facts is not None else "")

    def engine_stats(self) -> EngineStats | None:
        """The engine's counts after one of its last steps; None before it runs."""
        return self._llm.stats

    def facts(self) -> Facts | None:
        """What is known of the loaded model; None before it is loaded."""
        if self._facts is None and self._llm.stats is not None and self.healthy:
            self._facts = read_facts(self._llm)
        return self._facts

    def gpu(self) -> GpuReading | None:
        """The engine's card; None on a CPU, or where NVML cannot be asked."""
        if self._gpu is None:
            if self.facts() is None:
                return None
            self._gpu = GpuReader(self._llm.llm.device)
        return self._gpu.read()


def read_facts(llm: AsyncLLM) -> Facts:
    """The facts of a loaded model."""
    model, stats = llm.llm, llm.stats
    assert stats is not None, "only called once the engine runs"
    config = model.config
    labels = {
        "model": str(config.model.model),
        "dtype": str(config.model.dtype),
        "device": str(model.device),
        "cache_dtype": config.cache.kv_cache_dtype,
        "block_size": str(config.cache.block_size),
        "num_gpu_blocks": str(stats.gpu_blocks),
        "num_cpu_blocks": str(stats.cpu_blocks),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
        "max_model_len": str(model.engine.limits.max_model_len),
    }
    size = model.block_bytes
    return Facts(model.weight_bytes, stats.gpu_blocks * size, stats.cpu_blocks * size, labels)

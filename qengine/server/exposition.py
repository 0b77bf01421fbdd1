"""The server's counts as Prometheus metrics. Where vLLM has the same one, the name is its own, after `qengine:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from qengine.bench.about import versions
from qengine.server.live import share

if TYPE_CHECKING:
    from qengine.server.metrics import ServerMetrics

PREFIX = "qengine:"
LABEL = "model_name"
Values = dict[tuple[str, ...], float]


class Exposition(Collector):
    """Yields every metric of a ServerMetrics when its registry is collected."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._versions = {name: version or "" for name, version in versions().items()}

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask an engine that is still loading."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics; those of the engine and the card only where they can be read."""
        yield self._info("build", "Versions of qengine and of what it runs on.", self._versions)
        yield self._gauge("healthy", "1 if the engine takes requests.", {(): float(self._metrics.healthy)})
        yield from self._requests()
        yield from self._times()
        yield from self._engine()
        yield from self._memory()

    # The parts

    def _requests(self) -> Iterator[Metric]:
        m = self._metrics
        yield self._counter("prompt_tokens", "Prompt tokens taken.", {(): m.prompt_tokens})
        yield self._counter("generation_tokens", "Tokens generated.", {(): m.output_tokens})
        requests: Values = {(name,): count for name, count in list(m.requests.items())}
        yield self._counter("requests", "Prompts given to the engine.", requests, "endpoint")
        successes: Values = {(reason,): count for reason, count in list(m.successes.items())}
        yield self._counter("request_success", "Requests finished, by how.", successes, "finished_reason")
        yield self._counter("request_aborts", "Requests ended by their caller, or with the engine.", {(): m.aborts})
        errors: Values = {(kind, str(status)): count for (kind, status), count in list(m.errors.items())}
        yield self._counter("request_errors", "Requests answered with an error.", errors, "kind", "status")
        for name, about, tally in (
            ("request_prompt_tokens", "Prompt tokens of a request.", m.prompt_sizes),
            ("request_generation_tokens", "Tokens generated for a request.", m.output_sizes),
        ):
            yield self._histogram(name, about, tally.buckets(), tally.total)

    def _times(self) -> Iterator[Metric]:
        m = self._metrics
        for name, about, tally in (
            ("time_to_first_token", "From a request's arrival to its first token.", m.first_token),
            ("inter_token_latency", "Between two tokens of a stream, as the server sends them.", m.between),
            ("request_time_per_output_token", "A request's mean time a token after the first.", m.per_output_token),
            ("e2e_request_latency", "From a request's arrival to its end.", m.whole),
            ("request_queue_time", "From the engine's taking of a request to its first step.", m.queued),
            ("request_prefill_time", "From a request's first step to its first token.", m.prefill),
            ("request_decode_time", "From a request's first token to its last.", m.decode),
        ):
            yield self._histogram(f"{name}_seconds", about, tally.buckets(), tally.total)

    def _engine(self) -> Iterator[Metric]:
        stats = self._metrics.engine_stats()
        if stats is None:
            return
        for name, about, value in (
            ("num_requests_running", "Sequences being computed.", stats.running),
            ("num_requests_waiting", "Sequences that wait, without those swapped out.", stats.waiting - stats.swapped),
            ("num_requests_swapped", "Sequences swapped out to CPU memory.", stats.swapped),
            ("num_requests_compiling", "Sequences whose grammar is not ready yet.", stats.compiling),
            (
                "kv_cache_usage_perc",
                "Share of cache blocks in use, 0 to 1.",
                share(stats.gpu_blocks_used, stats.gpu_blocks),
            ),
            ("cpu_cache_usage_perc", "The same of the CPU tier.", share(stats.cpu_blocks_used, stats.cpu_blocks)),
        ):
            yield self._gauge(name, about, {(): value})
        for name, about, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens),
            ("prefix_cache_hits", "Those of them that were found.", stats.prefix_hit_tokens),
            ("prefix_cache_cpu_hits", "Those of them that were found in CPU memory.", stats.cpu_hit_tokens),
            ("evicted_blocks", "Cached blocks whose place was given up.", stats.evicted_blocks),
            ("dropped_blocks", "Blocks that the CPU tier gave up.", stats.dropped_blocks),
        ):
            yield self._counter(name, about, {(): value})
        kinds: Values = {("swap",): stats.preemptions_swapped, ("recompute",): stats.preemptions_recomputed}
        yield self._counter("num_preemptions", "Times a sequence gave up its blocks.", kinds, "kind")
        moved: Values = {("out",): stats.bytes_out, ("in",): stats.bytes_in}
        yield self._counter("swap_bytes", "Bytes copied to CPU memory (out) and back (in).", moved, "direction")

    def _memory(self) -> Iterator[Metric]:
        facts, gpu = self._metrics.facts(), self._metrics.gpu()
        if facts is not None:
            yield self._info("cache_config", "The model and its cache.", facts.labels)
            held: Values = {
                ("weights",): facts.weight_bytes, ("cache",): facts.cache_bytes, ("swap",): facts.swap_bytes
            }  # fmt: skip
            yield self._gauge("memory_bytes", "Bytes taken by weights, cache and CPU tier.", held, "kind")
        if gpu is not None:
            card = (str(gpu.index), gpu.name)
            for name, about, value in (
                ("gpu_utilization_ratio", "Share of the time a kernel ran, 0 to 1.", gpu.utilization),
                ("gpu_memory_used_bytes", "Memory in use on the card, by all processes.", gpu.used),
                ("gpu_memory_total_bytes", "Memory of the card.", gpu.total),
            ):
                yield self._gauge(name, about, {card: value}, "gpu", "gpu_name")

    # Each kind of metric, with the model's name as a label

    def _gauge(self, name: str, about: str, values: Values, *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(PREFIX + name, about, labels=[LABEL, *labels]), values)

    def _counter(self, name: str, about: str, values: Values, *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(PREFIX + name, about, labels=[LABEL, *labels]), values)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for labels, value in values.items():
            family.add_metric([self._metrics.model_name, *labels], value)
        return family

    def _histogram(self, name: str, about: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, about, labels=[LABEL])
        family.add_metric([self._metrics.model_name], buckets, total)
        return family

    def _info(self, name: str, about: str, labels: dict[str, str]) -> Metric:
        family = InfoMetricFamily(PREFIX + name, about, labels=[LABEL])
        family.add_metric([self._metrics.model_name], labels)
        return family

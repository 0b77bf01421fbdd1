"""What the page shows of the engine, as JSON: rates, memory, queues, the last requests. No prompts, no answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qengine.server.metrics import RequestRecord, ServerMetrics


def live_view(metrics: ServerMetrics) -> dict[str, Any]:
    """The state now.

    tokens_per_s: prompt and generated tokens over the last seconds. memory: bytes of weights, cache and swap (CPU
    memory), how much of both tiers is in use, and of the card where it can be read. waiting: without those swapped
    out. requests: the last ones, newest first.
    """
    now = time.monotonic()
    stats, facts, gpu = metrics.engine_stats(), metrics.facts(), metrics.gpu()
    rates = {"prompt": metrics.prompt_rate.per_second(now), "generation": metrics.output_rate.per_second(now)}
    view: dict[str, Any] = {
        "model": metrics.model_name,
        "healthy": metrics.healthy,
        "uptime_s": now - metrics.started,
        "tokens_per_s": rates,
        "tokens": {"prompt": metrics.prompt_tokens, "generation": metrics.output_tokens},
        "running": 0 if stats is None else stats.running,
        "waiting": 0 if stats is None else stats.waiting - stats.swapped,
        "swapped": 0 if stats is None else stats.swapped,
        "memory": {"weights": None, "cache": None, "swap": None, "cache_used": 0.0, "swap_used": 0.0},
        "prefix_hit_rate": 0.0 if stats is None else stats.prefix_hit_rate,
        "preemptions": 0 if stats is None else stats.preemptions_swapped + stats.preemptions_recomputed,
        "requests": [request_view(record, now) for record in reversed(metrics.recent)],
    }
    if facts is not None:
        view["memory"] |= {"weights": facts.weight_bytes, "cache": facts.cache_bytes, "swap": facts.swap_bytes}
    if stats is not None:
        view["memory"]["cache_used"] = share(stats.gpu_blocks_used, stats.gpu_blocks)
        view["memory"]["swap_used"] = share(stats.cpu_blocks_used, stats.cpu_blocks)
    if gpu is not None:
        view["gpu"] = {"name": gpu.name, "utilization": gpu.utilization, "used": gpu.used, "total": gpu.total}
    return view


def request_view(record: RequestRecord, now: float) -> dict[str, Any]:
    """One request: times in seconds (`started` since the epoch), counts of tokens, "running" or how it ended."""
    ended = now if record.ended is None else record.ended
    return {
        "id": record.request_id,
        "endpoint": record.endpoint,
        "state": record.reason or "running",
        "started": record.wall_time,
        "first_token_s": record.first_token_seconds,
        "seconds": ended - record.begun,
        "prompt_tokens": record.prompt_tokens,
        "generation_tokens": record.output_tokens,
    }


def share(part: int, whole: int) -> float:
    """part / whole, 0 of nothing."""
    return part / whole if whole else 0.0

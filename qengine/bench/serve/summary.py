"""The figures of a run: latencies, rates, goodput, and every failure by kind."""

from __future__ import annotations

import itertools
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qengine.bench.serve.client import Outcome
from qengine.bench.serve.run import Measured

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
LATE_SECONDS = 0.01
"""A client whose loop is late by more, at the 99th percentile, measures itself."""


def summary(measured: Measured) -> dict[str, Any]:
    """The report, ready for json.dump. Latencies in milliseconds, of the requests that succeeded."""
    good = [outcome for outcome in measured.outcomes if outcome.error is None]
    bad = [outcome for outcome in measured.outcomes if outcome.error is not None]
    return {
        "benchmark": "serve",
        **_head(measured),
        "requests": len(measured.outcomes),
        "succeeded": len(good),
        "failed": len(bad),
        "failures": failures(bad),
        "seconds": measured.seconds,
        "most_open": measured.most_open,
        "left_out": measured.left_out,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "output_tokens": sum(outcome.output_tokens for outcome in good),
        "tokens_counted_by": counted_by(good),
        "finish_reasons": dict(Counter(str(outcome.finish_reason) for outcome in good)),
        **rates(good, measured.seconds),
        "latency_ms": latencies(good),
        "goodput": goodput(measured),
        "client": client_health(measured),
    }


def _head(measured: Measured) -> dict[str, Any]:
    from qengine.bench.about import commit, versions

    return {
        "options": measured.options.as_json(),
        "server_version": measured.server_version,
        "versions": versions(),
        "commit": commit(),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "command": command(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def command(arguments: Sequence[str]) -> str:
    """The command line without the key that it may hold."""
    shown = [Path(arguments[0]).name]
    for before, text in itertools.pairwise(arguments):
        hidden = before == "--api-key" or text.startswith("--api-key=")
        shown.append("--api-key=***" if text.startswith("--api-key=") else "***" if hidden else text)
    return " ".join(shown)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles (between neighbours in proportion), in milliseconds; None of nothing."""
    if not values:
        return None
    found = {name: float(np.percentile(values, q)) * 1e3 for name, q in QUANTILES.items()}
    return {"mean": float(np.mean(values)) * 1e3, **found, "max": max(values) * 1e3}


def latencies(good: Sequence[Outcome]) -> dict[str, dict[str, float] | None]:
    """To the first token, a token after it (mean of a request), between chunks, whole request, wait at the client."""
    return {
        "ttft": spread([outcome.first for outcome in good if outcome.first is not None]),
        "tpot": spread([each for outcome in good if (each := outcome.per_token) is not None]),
        "itl": spread([gap for outcome in good for gap in outcome.gaps]),
        "e2e": spread([outcome.total for outcome in good]),
        "client_wait": spread([outcome.waited for outcome in good]),
    }


def rates(good: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """Per second of the run, of the requests that succeeded."""
    output = sum(outcome.output_tokens for outcome in good)
    return {
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + sum(outcome.prompt_tokens for outcome in good)) / seconds,
    }


def counted_by(good: Sequence[Outcome]) -> str:
    """Where counts of tokens come from: what the server says of usage, or chunks where it says nothing."""
    told = sum(outcome.usage for outcome in good)
    return "usage" if told == len(good) else f"chunks for {len(good) - told} of {len(good)} requests"


def failures(bad: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Kind -> how many, and what the first of them said."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in bad:
        entry = found.setdefault(str(outcome.error), {"count": 0, "first": outcome.detail})
        entry["count"] += 1
    return found


def meets(outcome: Outcome, goals: Sequence[tuple[str, float]]) -> bool:
    """Whether a request succeeded within every limit (milliseconds). One token has no time per token, and meets it."""
    if outcome.error is not None:
        return False
    measured = {
        "ttft": outcome.first if outcome.first is not None else math.inf,
        "tpot": outcome.per_token or 0.0,
        "itl": max(outcome.gaps, default=0.0),
        "e2e": outcome.total,
    }
    return all(measured[name] * 1e3 <= limit for name, limit in goals)


def goodput(measured: Measured) -> dict[str, Any] | None:
    """Requests a second within all limits, and their share of all requests, failed ones included."""
    goals = measured.options.goodput
    if not goals:
        return None
    met = sum(meets(outcome, goals) for outcome in measured.outcomes)
    return {
        "limits_ms": dict(goals),
        "requests_per_s": met / measured.seconds,
        "share": met / len(measured.outcomes),
    }


def client_health(measured: Measured) -> dict[str, Any]:
    """What the client's own load was: the share of a core that it took, and by how much its loop was late."""
    lags = spread(measured.lags)
    late = lags is not None and lags["p99"] > LATE_SECONDS * 1e3
    return {"cpu_share": measured.cpu_share, "late_ms": lags, "too_slow": late}

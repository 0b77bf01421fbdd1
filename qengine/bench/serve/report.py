"""The run's report for people: a table on the terminal, and a chart where matplotlib is installed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qengine.bench.serve.run import Measured
from qengine.bench.serve.summary import LATE_SECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "ttft": "first token",
    "tpot": "per token after it",
    "itl": "between chunks",
    "e2e": "whole request",
    "client_wait": "wait at the client",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def facts(report: dict[str, Any]) -> list[str]:
    """One line each: what was asked, what came, what went wrong."""
    options = report["options"]
    load = f"{report['requests']} requests to {options['base_url']} ({options['endpoint']}, {options['model']})"
    rate = "all at once" if options["request_rate"] == "inf" else f"{options['request_rate']:g} a second"
    limit = f", at most {options['max_concurrency']} under way" if options["max_concurrency"] else ""
    lines = [
        f"{load}, {rate}{limit}; {report['most_open']} were under way at once",
        f"{report['succeeded']} succeeded, {report['failed']} failed, in {report['seconds']:.2f} s",
        f"{report['output_tokens_per_s']:,.1f} output tokens/s, {report['total_tokens_per_s']:,.1f} with prompts, "
        f"{report['requests_per_s']:.2f} requests/s",
    ]
    if report["goodput"]:
        goals = " ".join(f"{name}:{limit:g}" for name, limit in report["goodput"]["limits_ms"].items())
        good = report["goodput"]
        lines.append(f"goodput ({goals}): {good['requests_per_s']:.2f} requests/s, {good['share']:.1%} of all")
    if report["left_out"]:
        lines.append(f"{report['left_out']} conversations are longer than the model's context and were left out")
    if report["tokens_counted_by"] != "usage":
        lines.append(f"the server told no usage: tokens are counted as {report['tokens_counted_by']}")
    if report["client"]["too_slow"]:
        late = report["client"]["late_ms"]["p99"]
        lines.append(
            f"THE CLIENT IS TOO SLOW: its loop is {late:.0f} ms late at the 99th percentile (allowed are "
            f"{LATE_SECONDS * 1e3:.0f}); run it on a machine of its own, or with a lower rate"
        )
    for kind, entry in report["failures"].items():
        lines.append(f"FAILED {entry['count']}: {kind}: {entry['first']}")
    return lines


def show(report: dict[str, Any]) -> None:
    """Facts and table on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for line in facts(report):
        console.print(escape(line))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("milliseconds")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, title in TITLES.items():
        values = report["latency_ms"][name]
        if values and (name != "client_wait" or report["options"]["max_concurrency"]):
            table.add_row(title, *(f"{values[column]:,.1f}" for column in COLUMNS))
    if table.row_count:
        console.print(table)


def plot(measured: Measured, report: dict[str, Any], path: Path) -> str | None:
    """Draw the latencies' distributions and what went on over time. Returns why not, or None if it did."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "matplotlib is not installed: no chart (pip install matplotlib)"
    good = [outcome for outcome in measured.outcomes if outcome.error is None]
    if not good:
        return "no request succeeded: no chart"
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5))
    goals = dict(measured.options.goodput)
    _distribution(axes[0, 0], "first token", [1e3 * o.first for o in good if o.first is not None], goals.get("ttft"))
    each = [1e3 * value for o in good if (value := o.per_token) is not None]
    _distribution(axes[0, 1], "per token after the first", each, goals.get("tpot"))
    _distribution(axes[1, 0], "whole request", [1e3 * o.total for o in good], goals.get("e2e"))
    _timeline(axes[1, 1], measured)
    options = report["options"]
    figure.suptitle(
        f"{options['model']}: {report['requests']} requests, {report['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{report['failed']} failed"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None


def _distribution(axis: Axes, title: str, values: list[float], goal: float | None) -> None:
    """Share of the requests at or below each latency, its percentiles marked."""
    ordered = sorted(values)
    count = len(ordered)
    axis.step(ordered, [(index + 1) / count for index in range(count)], where="post")
    for share in (0.5, 0.9, 0.99):
        axis.axhline(share, color="0.85", linewidth=0.8, zorder=0)
    if goal is not None:
        axis.axvline(goal, color="tab:red", linestyle="--", linewidth=1, label=f"limit, {goal:g} ms")
        axis.legend(loc="lower right")
    axis.set(title=title, xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1.02))


def _timeline(axis: Axes, measured: Measured) -> None:
    """Requests under way over time; failures as marks at the bottom."""
    changes = [(o.sent, 1) for o in measured.outcomes] + [(o.sent + o.total, -1) for o in measured.outcomes]
    changes.sort()
    axis.step([at for at, _ in changes], list(itertools.accumulate(step for _, step in changes)), where="post")
    failed = [o.sent + o.total for o in measured.outcomes if o.error is not None]
    if failed:
        axis.plot(failed, [0] * len(failed), "x", color="tab:red", label=f"{len(failed)} failed")
        axis.legend(loc="upper right")
    axis.set(title="requests under way", xlabel="seconds", ylim=(0, None))

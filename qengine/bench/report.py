"""The serving report for people: a table, a Markdown text, and a chart where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qengine.checkpoint.writer import write_json

TITLES = {
    "latency": "one stream",
    "ttft": "first token",
    "streams": "streams at once",
    "mixed": "mixed lengths",
    "async": "streams, AsyncLLM",
    "oversubscribed_swap": "oversubscribed, swap",
    "oversubscribed_recompute": "oversubscribed, recompute",
}
COLUMNS = (
    "load",
    "requests",
    "in",
    "out",
    "seconds",
    "output tokens/s",
    "predicted",
    "all tokens/s",
    "first token ms",
    "vLLM",
)


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row of text a load, under COLUMNS; the last column is the reference's figure for it, if there is one."""
    beside = report.get("reference") or {}
    rows: list[tuple[str, ...]] = []
    for load in report["loads"]:
        typical = load["output_tokens"] / load["output_tokens_per_s"]
        first = load["ttft_ms"]
        other = beside.get("ttft_ms") if load["name"] == "ttft" else beside.get(load["name"])
        unit = " ms" if load["name"] == "ttft" else ""
        rows.append(
            (
                TITLES.get(load["name"], load["name"]),
                f"{load['requests']}",
                f"{load['prompt_tokens']}",
                f"{load['output_tokens']}",
                f"{typical:.2f}",
                f"{load['output_tokens_per_s']:,.0f}" if load["name"] != "ttft" else "",
                _predicted(load),
                f"{load['total_tokens_per_s']:,.0f}",
                f"{first['p50']:,.1f}" + (f" (p99 {first['p99']:,.0f})" if load["requests"] > 1 else ""),
                "" if other is None else f"{other:,}{unit}",
            )
        )
    return rows


def _predicted(load: dict[str, Any]) -> str:
    """The cost model's rate, or for a single token its time."""
    rate = load.get("predicted_tokens_per_s")
    if rate is None:
        return ""
    return f"{1e3 / rate:,.1f} ms" if load["name"] == "ttft" else f"{rate:,.0f}"


def facts(report: dict[str, Any]) -> list[str]:
    """One line each: card, cache, memory, start-up, notes."""
    card, cache, memory = report["card"], report["cache"], report["memory"]
    beside = report.get("reference") or {}
    where = f"{card['name']}, {card['memory_gib']:.1f} GiB" if card else f"device {report['device']}"
    lines = [f"{report['model']} on {where}; qengine {report['versions']['qengine']}, commit {report['commit']}"]
    if report.get("code_generation"):
        lines.append(f"code generated for {report['code_generation']} (TRITON_OVERRIDE_ARCH)")
    if cache:
        text = f"cache: {cache['tokens']:,} tokens, {cache['dtype']}, blocks of {cache['block_size']}"
        lines.append(text + (f" (vLLM {beside['cache_tokens']:,})" if "cache_tokens" in beside else ""))
    if memory.get("peak_gib") is not None:
        lines.append(f"peak memory: {memory['peak_gib']:.2f} GiB, counted for {memory['counted']}")
    if memory.get("use_gib"):
        lines.append("of it: " + ", ".join(f"{name} {value:.2f}" for name, value in memory["use_gib"].items()))
    for start in report["startup"]:
        text = f"start-up, {start['triton_cache']} Triton cache: first token after {start['first_token_s']:.1f} s"
        lines.append(text + f" (imports {start['import_s']:.1f}, loaded {start['load_s']:.1f})")
    lines += [f"{TITLES.get(load['name'], load['name'])}: {load['note']}" for load in report["loads"] if load["note"]]
    lines += [f"skipped {name}: {reason}" for name, reason in report["skipped"].items()]
    lines += [f"FAILED {name}: {reason}" for name, reason in report["failed"].items()]
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Facts and table as Markdown."""
    rows = table_rows(report)
    used = [i for i, _ in enumerate(COLUMNS) if any(row[i] for row in rows)]
    lines = ["| " + " | ".join(COLUMNS[i] for i in used) + " |", "|" + "---|" * len(used)]
    lines += ["| " + " | ".join(row[i] for i in used) + " |" for row in rows]
    return "\n".join([*(f"* {line}" for line in facts(report)), "", *lines]) + "\n"


def show(report: dict[str, Any]) -> None:
    """Facts and table on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    rows = table_rows(report)
    table = Table(box=None, pad_edge=False, header_style="bold")
    used = [i for i, _ in enumerate(COLUMNS) if any(row[i] for row in rows)]
    for i in used:
        table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*[escape(row[i]) for i in used])
    for line in facts(report):
        console.print(escape(line))
    if rows:
        console.width = max(console.width, 120)
        console.print(table)


def save(report: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.json and NAME.md; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", report)
    (folder / f"{name}.md").write_text(markdown(report), encoding="utf-8")


def plot(report: dict[str, Any], path: Path) -> str | None:
    """Draw output tokens/s of each load, with the reference's beside them. Returns why not, or None if it did."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "matplotlib is not installed: no chart (pip install matplotlib)"
    loads = [load for load in report["loads"] if load["name"] != "ttft"]
    if not loads:
        return "no load with a rate was run: no chart"
    beside = report.get("reference") or {}
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.6 * len(loads)), layout="constrained")
    names = [TITLES.get(load["name"], load["name"]) for load in loads]
    rates = [load["output_tokens_per_s"] for load in loads]
    others = [beside.get(load["name"]) for load in loads]
    offset = 0.2 if any(others) else 0.0
    places = range(len(loads))
    bars = axis.barh([p - offset for p in places], rates, height=0.38 if offset else 0.6, label="qengine")
    axis.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=3)
    if offset:
        bars = axis.barh(
            [p + offset for p in places], [o or 0 for o in others], height=0.38, color="0.7", label=beside["engine"]
        )
        axis.bar_label(bars, labels=["" if o is None else f"{o:,}" for o in others], padding=3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    card = report["card"]["name"] if report["card"] else report["device"]
    axis.set(title=f"{report['model']} on {card}", xlabel="output tokens a second")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None


def read(path: Path) -> dict[str, Any]:
    """A report that `save` wrote."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report

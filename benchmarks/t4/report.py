"""What the steps found, as Markdown, JSON and a chart: measured beside predicted, and what was left out and why."""

from __future__ import annotations

import json
from pathlib import Path

TITLES = {"latency": "one stream", "streams": "streams at once", "mixed": "mixed lengths", "async": "AsyncLLM"}


def save(results: dict[str, dict], folder: Path, *, quick: bool) -> None:
    """Write report.json and report.md."""
    (folder / "report.json").write_text(json.dumps({"quick": quick, "steps": results}, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(results, quick=quick), encoding="utf-8")


def markdown(results: dict[str, dict], *, quick: bool) -> str:
    """The whole report."""
    lines = ["# qengine on this machine", ""]
    if quick:
        lines += ["A quick run: small loads and few sizes; its rates are no benchmark.", ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    for name, found in results.items():
        reason = f": {found['reason']}" if found.get("reason") else ""
        lines.append(f"| {name} | {found['status']}{reason} | {found.get('seconds', '')} |")
    parts = {"card": _card, "check": _check, "tests": _tests, "gemm": _gemm, "attention": _attention, "plan": _plan}
    parts |= {"serving": _serving, "serving_int8": _serving}
    for name, make in parts.items():
        found = results.get(name, {})
        body = make(found) if found.get("status") in ("done", "failed") else []
        if body:
            lines += ["", f"## {name}", "", *body]
    return "\n".join(lines) + "\n"


def _card(found: dict) -> list[str]:
    lines = []
    for card in found.get("cards", []):
        lines.append(f"* {card['name']}, sm_{card['sm']}, {card['memory_gib']} GiB, driver {card['driver']}")
    versions = found.get("versions", {})
    lines.append("* " + ", ".join(f"{name} {value}" for name, value in versions.items() if value))
    for key, assumed, words in (
        ("copy_gb_per_s", "assumed_copy_gb_per_s", "copy on the card"),
        ("from_host_gb_per_s", "assumed_link_gb_per_s", "from pinned memory"),
        ("to_host_gb_per_s", "assumed_link_gb_per_s", "to pinned memory"),
    ):
        if key in found:
            beside = f" (the cost model assumes {found[assumed]:.0f})" if assumed in found else ""
            lines.append(f"* {words}: {found[key]:.0f} GB/s{beside}")
    return lines + [f"* {text}" for text in found.get("findings", [])]


def _check(found: dict) -> list[str]:
    rows = found.get("rows", [])
    good = sum(row["ok"] for row in rows)
    lines = [f"{good} of {len(rows)} checks within their limits."] if rows else []
    bad = [row for row in rows if not row["ok"]]
    return lines + [f"* {row['name']}: error {row['error']:.2g}, limit {row['limit']:.2g}" for row in bad]


def _tests(found: dict) -> list[str]:
    return [found.get("summary", ""), *(f"* {line}" for line in found.get("failed", []))]


def _ratio(measured: float, predicted: float | None) -> str:
    return "" if predicted is None else f"{measured / predicted:.2f}"


def _head(titles: tuple[str, ...]) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _gemm(found: dict) -> list[str]:
    titles = ("model", "N x K", "rows", "us", "predicted", "measured / predicted", "GB/s of weights", "TFLOP/s")
    lines = _head(titles)
    for row in found.get("rows", []):
        lines.append(
            f"| {row['model']} | {row['n']} x {row['k']} | {row['m']} | {_us(row['us'])} | "
            f"{_us(row['predicted_us'])} | {_ratio(row['us'], row['predicted_us'])} | {row['gb_per_s']:.0f} | "
            f"{row['tflop_per_s']:.1f} |"
        )
    return lines + [f"* {note}" for note in found.get("notes", [])]


def _attention(found: dict) -> list[str]:
    titles = ("attention", "heads", "cache", "sequences x length", "us", "predicted", "measured / predicted")
    lines = _head(titles)
    for row, expected in zip(found.get("rows", []), found.get("predictions", []), strict=False):
        lines.append(
            f"| {row['what']} | {row['heads']} on {row['kv_heads']} | {row['kind']} | {row['sequences']} x "
            f"{row['length']} | {_us(row['us'])} | {_us(expected)} | {_ratio(row['us'], expected)} |"
        )
    return lines


def _plan(found: dict) -> list[str]:
    plan = found.get("plan")
    if not plan:
        return []
    sizes = ", ".join(f"{name} {size:.2f}" for name, size in plan["gpu_gib"].items() if size)
    lines = [
        f"* {plan['model']} on {plan['gpu']}, {plan['limit_gib']:.2f} GiB: {'fits' if plan['fits'] else 'does not fit'}"
    ]
    lines.append(f"* GiB: {sizes}")
    lines += [f"* cache of {kind}: {row['tokens']:,} tokens" for kind, row in plan["cache"].items()]
    return lines + [f"* {text}" for text in plan["advice"]]


def _serving(found: dict) -> list[str]:
    if "report" not in found:
        return []
    from qengine.bench.report import markdown as serving_markdown

    return serving_markdown(found["report"]).rstrip().splitlines()


def plot(results: dict[str, dict], path: Path) -> str | None:
    """Measured beside predicted: rates of serving and times of the product. Returns why not, or None if drawn."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "matplotlib is not installed"
    panels = [panel for panel in (_rates(results), _times(results)) if panel]
    if not panels:
        return "nothing was measured that could be drawn"
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 4.5), squeeze=False)
    for axis, (title, unit, rows) in zip(axes[0], panels, strict=True):
        places = range(len(rows))
        axis.barh([p - 0.2 for p in places], [row[1] for row in rows], height=0.38, label="measured")
        axis.barh([p + 0.2 for p in places], [row[2] or 0 for row in rows], height=0.38, color="0.7", label="predicted")
        axis.set_yticks(list(places), [row[0] for row in rows])
        axis.invert_yaxis()
        axis.set(title=title, xlabel=unit)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None


def _rates(results: dict[str, dict]) -> tuple[str, str, list[tuple[str, float, float | None]]] | None:
    rows = []
    for step, words in (("serving", "float16"), ("serving_int8", "int8")):
        for load in results.get(step, {}).get("report", {}).get("loads", []):
            if load["name"] in TITLES:
                name = f"{TITLES[load['name']]}, {words}"
                rows.append((name, load["output_tokens_per_s"], load.get("predicted_tokens_per_s")))
    return ("serving", "output tokens a second", rows) if rows else None


def _times(results: dict[str, dict]) -> tuple[str, str, list[tuple[str, float, float | None]]] | None:
    sums: dict[str, list[float]] = {}
    for row in results.get("gemm", {}).get("rows", []):
        total = sums.setdefault(f"{row['model']}, {row['m']} rows", [0.0, 0.0])
        total[0] += row["us"]
        total[1] += row["predicted_us"] or 0.0
    rows = [(name, us, predicted or None) for name, (us, predicted) in sums.items()]
    return ("four linears of a layer", "microseconds", rows) if rows else None

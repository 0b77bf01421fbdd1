"""The conversion's report as one HTML page: tables and plots, nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 260, 62, 34
COLORS = ("#2563eb", "#9ca3af", "#dc2626")

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); }
td + td, th + th { text-align: right; } code { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.scroll { overflow-x: auto; }
"""


def report_page(report: dict[str, Any]) -> str:
    """The page for what `ConvertReport.as_dict(timing=False)` gives, with "versions"."""
    settings = report["settings"]
    title = f"{report['source']}: {settings['method']}, {settings['bits']} bits"
    parts = [f"<h1>{html.escape(title)}</h1>", _facts(report)]
    if report.get("evaluation"):
        parts.append(_perplexity(report["evaluation"]))
    errors = list(report["layer_errors"])
    if any(error is not None for error in errors):
        parts.append("<h2>Distance of the hidden states from the source's, after each layer</h2>")
        parts.append(
            "<p>Squared, relative, on the calibration text; every layer's inputs come from quantized ones.</p>"
        )
        parts.append(plot([("layer's output", errors)], "layer"))
    parts += _linears(report["linears"])
    if report["warnings"]:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in report["warnings"])
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = f"<body>{''.join(parts)}</body>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>{body}</html>\n'


def _facts(report: dict[str, Any]) -> str:
    settings = report["settings"]
    before, after = report["source_bytes"], report["out_bytes"]
    rows = [
        ("command", f"<code>{html.escape(report['command'])}</code>"),
        ("format", settings["format"]),
        ("bits, group, grid", f"{settings['bits']}, {settings['group_size']}, {'sym' if settings['sym'] else 'asym'}"),
        ("calibration", f"{report['calibration_tokens']} tokens, seed {settings['seed']}"),
        (
            "weight files",
            f"{before / 1e6:.1f} MB &rarr; {after / 1e6:.1f} MB ({before / max(after, 1):.2f} times less)",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
    ]
    return f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in rows)}</table>"


def _perplexity(evaluation: dict[str, Any]) -> str:
    before, after = evaluation["before"], evaluation["after"]
    where = f"{evaluation['windows']} windows of {evaluation['seq_len']} tokens of the bundled evaluation text"
    return (
        f"<h2>Perplexity</h2><p>{where}, float32: {before:.3f} before, {after:.3f} after "
        f"(+{100 * (after / before - 1):.2f} %).</p>"
    )


def _linears(linears: Sequence[dict[str, Any]]) -> list[str]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in linears:
        kinds.setdefault(record["name"].rsplit(".", 1)[-1], []).append(record)
    parts = ["<h2>Error of each linear's outputs</h2>", "<p>Relative, as rounded and as round-to-nearest would be.</p>"]
    rows = []
    for kind, records in kinds.items():
        means = [_mean([record[key] for record in records]) for key in ("error", "rtn_error", "weight_error")]
        bits = "/".join(str(b) for b in sorted({record["bits"] for record in records}))
        ways = ", ".join(f"{sum(r['method'] == way for r in records)} {way}" for way in _ways(records))
        rows.append(f"<tr><td>{html.escape(kind)}</td><td>{bits}</td><td>{ways}</td>{''.join(map(_cell, means))}</tr>")
    head = "".join(
        f"<th>{text}</th>" for text in ("linear", "bits", "method", "error", "round-to-nearest", "of weights")
    )
    parts.append(f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>')
    for kind, records in kinds.items():
        if len(records) > 1 and any(record["error"] is not None for record in records):
            series = [("as rounded", "error"), ("round-to-nearest", "rtn_error")]
            parts.append(f"<h2>{html.escape(kind)}</h2>")
            parts.append(plot([(name, [record[key] for record in records]) for name, key in series], "layer"))
    return parts


def _ways(records: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({record["method"] for record in records})


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cell(value: float | None) -> str:
    return f"<td>{'-' if value is None else f'{100 * value:.3f} %'}</td>"


def plot(series: Sequence[tuple[str, Sequence[float | None]]], axis: str) -> str:
    """An SVG of lines over 0, 1, 2, ... with a logarithmic scale; absent values and those not positive are left out."""
    known = [value for _, values in series for value in values if value is not None and value > 0]
    if not known:
        return ""
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    high = max(high, low + 1)
    count = max(len(values) for _, values in series)

    def x(index: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * index / max(count - 1, 1)

    def y(value: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (high - math.log10(value)) / (high - low)

    marks = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8884"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index in sorted({0, count // 2, count - 1}):
        marks.append(f'<text x="{x(index):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{axis} {index}</text>')
    for number, (name, values) in enumerate(series):
        points = [(x(i), y(v)) for i, v in enumerate(values) if v is not None and v > 0]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        color = COLORS[number % len(COLORS)]
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        marks += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in points]
        at = LEFT + 10 + 160 * number
        marks.append(f'<text x="{at}" y="{HEIGHT - 1}" style="fill:{color}">{html.escape(name)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'

"""Tables and plot of the GEMM benchmark, written from its JSON, and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {"qengine": "qengine", "cublas_fp16": "cuBLAS fp16", "gemlite": "gemlite", "tinygemm": "tinygemm"}
BARS = {1: 45.0, 16: 48.0, 64: 85.0, 256: 190.0}
"""Microseconds to reach for the four linears of a Llama-2-7B layer, by rows."""
BAR_CUBLAS = {2048: 1.08, 4096: 1.08, 8192: 1.08}
"""Times to reach, as multiples of cuBLAS fp16."""
STYLES = {"qengine": "o-", "cublas_fp16": "s--", "gemlite": "^:", "tinygemm": "v:"}
MARKERS = ("<!-- gemm.json -->", "<!-- end of gemm.json -->")
ROOT = Path(__file__).resolve().parents[1]


def sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The four linears of a layer added up, for each model and batch."""
    found = []
    for model in dict.fromkeys(r["model"] for r in rows):
        for m in sorted({r["m"] for r in rows}):
            group = [r for r in rows if r["model"] == model and r["m"] == m]
            total = {p: sum(r[p] for r in group) for p in NAMES if group and all(p in r for r in group)}
            weight_bytes = sum(r["n"] * r["k"] * (0.5 + 4 / 128) for r in group)
            found.append({"model": model, "m": m, "weight_bytes": weight_bytes, **total})
    return found


def table(result: dict[str, Any]) -> str:
    """The sums as a Markdown table, with what was to be reached and the ratio to cuBLAS."""
    peers = [p for p in NAMES if any(p in r for r in result["layers"])]
    heads = ["model", "M", "floor", *(NAMES[p] for p in peers), "of cuBLAS", "to reach"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in result["layers"]:
        cells = [f"{r[p]:.1f}" if p in r else "" for p in peers]
        floor = r["weight_bytes"] / result["copy_tb_per_s"] / 1e6
        ratio = f"{r['qengine'] / r['cublas_fp16']:.2f}"
        reach = ""
        if r["model"] == "Llama-2-7B":
            reach = f"{BARS[r['m']]:.0f}" if r["m"] in BARS else ""
            reach = f"{BAR_CUBLAS[r['m']]} of cuBLAS" if r["m"] in BAR_CUBLAS else reach
        lines.append("| " + " | ".join([r["model"], str(r["m"]), f"{floor:.1f}", *cells, ratio, reach]) + " |")
    return "\n".join(lines)


def about(result: dict[str, Any]) -> str:
    """One line: what was measured, where, with what."""
    peers = ", ".join(f"{name} ({version})" for name, version in result.get("peers", {}).items())
    return (
        f"{result['gpu']}, copy {result['copy_tb_per_s']:.2f} TB/s, torch {result['torch']}, Triton {result['triton']}"
        f"{', peers ' + peers if peers else ''}; commit {result['commit'][:20]}, `{result['command']}`. Microseconds."
    )


def put_between(text: str, block: str) -> str:
    """The text with what is between MARKERS replaced by the block; as it was where it has no markers."""
    first, last = MARKERS
    if first not in text or last not in text:
        return text
    return text[: text.index(first) + len(first)] + "\n" + block + "\n" + text[text.index(last) :]


def plot(layers: list[dict[str, Any]], path: Path) -> None:
    """Time against batch, one panel a model. Does nothing but say so where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot was written; pip install matplotlib, then run with --report")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(r["model"] for r in layers))
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 4.2), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for peer, style in STYLES.items():
            points = [(r["m"], r[peer]) for r in layers if r["model"] == model and peer in r]
            if points:
                axis.loglog(*zip(*points, strict=True), style, base=2, label=NAMES[peer])
        axis.set(title=f"{model}, four linears, group 128", xlabel="rows of x (M)", ylabel="microseconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(result: dict[str, Any], folder: Path, readmes: tuple[Path, ...] | None = None) -> None:
    """Write gemm.md and gemm.png into the folder, and the table into the READMEs that have markers for it.

    readmes: the folder's own and, for the project's own results, the project's where not given.
    """
    text = f"{about(result)}\n\n{table(result)}\n"
    print(text)
    (folder / "gemm.md").write_text(text)
    plot(result["layers"], folder / "gemm.png")
    if readmes is None:
        own = folder.resolve() == ROOT / "benchmarks" / "results"
        readmes = (folder / "README.md", ROOT / "README.md") if own else (folder / "README.md",)
    for path in readmes:
        if path.is_file():
            old = path.read_text()
            new = put_between(old, text)
            if new != old:
                path.write_text(new)

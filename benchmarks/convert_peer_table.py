"""What the rows of `convert_peers.py` come to: mean and spread over the seeds, and how far we are from the best peer.

    python benchmarks/convert_peer_table.py benchmarks/results/convert_peers.json      # prints it as Markdown

`increase` is the perplexity over that of the source in float32. A share is our increase divided by that of the peer
whose mean is lowest; its spread is over the seeds, each seed's rows calibrated on the same windows.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
GPTQ, AWQ = ("gptqmodel", "llmcompressor-gptq"), ("autoawq", "llmcompressor-awq")


@dataclass(frozen=True)
class Bar:
    """`ours` is to have at most `limit` of what the best of `peers` has in the rows' field `key`."""

    name: str
    ours: str
    peers: tuple[str, ...]
    limit: float
    key: str = "increase"


BARS = (
    Bar("AWQ", "qengine-awq", AWQ, 0.85),
    Bar("GPTQ", "qengine-gptq", GPTQ, 0.85),
    Bar("best", "qengine-best", AWQ + GPTQ, 0.75),
    Bar("symmetric GPTQ", "qengine-gptq-sym", ("gptqmodel-sym", "llmcompressor-gptq-sym"), 0.85),
    Bar("seconds of AWQ", "qengine-awq", ("llmcompressor-awq",), 0.5, "seconds"),
    Bar("processor seconds of AWQ", "qengine-awq", ("llmcompressor-awq",), 0.5, "cpu_seconds"),
)


def by_seed(rows: Rows, way: str, key: str) -> dict[int, float]:
    """seed -> value of one way."""
    return {row["seed"]: row[key] for row in rows if row["way"] == way and key in row}


def summary(rows: Rows) -> Rows:
    """A row a way: means over the seeds, and the lowest and highest perplexity."""
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        perplexities = [row["perplexity"] for row in own]
        line = {"way": way, "seeds": sorted(row["seed"] for row in own)}
        line |= {"perplexity": round(statistics.mean(perplexities), 3)}
        line |= {"lowest": min(perplexities), "highest": max(perplexities)}
        for key in ("increase", "seconds", "cpu_seconds", "peak_mib", "gpu_peak_mib"):
            values = [row[key] for row in own if key in row]
            if values:
                line[key] = round(statistics.mean(values), 3 if key == "increase" else 1)
        found.append(line)
    return found


def compare(rows: Rows) -> Rows:
    """The bars for which both sides have a seed in common."""
    found = []
    for bar in BARS:
        ours = by_seed(rows, bar.ours, bar.key)
        peers = {peer: by_seed(rows, peer, bar.key) for peer in bar.peers}
        shared = {peer: sorted(set(ours) & set(values)) for peer, values in peers.items()}
        # A peer that has fewer seeds than another is no measure of the best.
        most = max((len(seeds) for seeds in shared.values()), default=0)
        full = {peer: seeds for peer, seeds in shared.items() if seeds and len(seeds) == most}
        if not full:
            continue
        best = min(full, key=lambda peer: statistics.mean(peers[peer][seed] for seed in full[peer]))
        seeds = full[best]
        mean = statistics.mean(ours[s] for s in seeds) / statistics.mean(peers[best][s] for s in seeds)
        shares = [round(ours[seed] / peers[best][seed], 3) for seed in seeds]
        line = {"bar": bar.name, "peer": best, "limit": bar.limit, "share": round(mean, 3), "seeds": seeds}
        line |= {"shares": shares, "missing": sorted(set(bar.peers) - set(full)), "met": mean <= bar.limit}
        found.append(line)
    return found


def markdown(table: dict[str, Any]) -> str:
    """Both as tables."""
    lines = [f"Source in float32: {table['source_perplexity']:.2f}. {table['machine']}, {table['device']}.", ""]
    lines += ["| | perplexity, mean of the seeds | lowest, highest | increase | s | processor s | peak MiB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in summary(table["rows"]):
        spread = f"{row['lowest']:.2f}, {row['highest']:.2f}"
        cells = [row["way"], f"{row['perplexity']:.2f} ({len(row['seeds'])})", spread, f"{row['increase']:.2f}"]
        cells += [str(row.get(key, "")) for key in ("seconds", "cpu_seconds", "peak_mib")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| | beside | share | of each seed | to reach |", "|---|---|---|---|---|"]
    for row in compare(table["rows"]):
        without = f" (without {', '.join(row['missing'])})" if row["missing"] else ""
        shares = ", ".join(f"{share:.2f}" for share in row["shares"])
        lines.append(f"| {row['bar']} | {row['peer']}{without} | {row['share']:.2f} | {shares} | {row['limit']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))

"""How much perplexity a conversion costs: methods, grids and calibration samples, each against the source in float32.

    python benchmarks/convert_quality.py MODEL                                  # rtn, awq, gptq, best; one sample
    python benchmarks/convert_quality.py MODEL --methods awq best --seeds 0 1 2 --sym --asym --json
    python benchmarks/convert_quality.py MODEL --device cuda --text other.txt

64 windows of 512 tokens of the bundled text (Moby-Dick) calibrate, drawn by the seed. Perplexity is that of the
dequantized weights in float32 on the first 24 windows of 2,048 tokens of `--text`, by default the bundled evaluation
text (State of the Union addresses up to 1944). `share` is the growth of the mean loss over the source's.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import open_checkpoint
from qengine.convert.calibration import bundled_text, load_tokenizer
from qengine.convert.run import convert_checkpoint
from qengine.models import load_model
from qengine.perplexity import Perplexity, perplexity

METHODS = ("rtn", "awq", "gptq", "best")


@dataclass(frozen=True)
class Case:
    """One conversion."""

    method: str
    sym: bool
    seed: int


class Scorer:
    """Perplexity of folders on one text, tokenized by the source's tokenizer."""

    def __init__(self, source: Path, text: str, device: str, windows: int, seq_len: int) -> None:
        self.ids = load_tokenizer(source)(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.device, self.windows, self.seq_len = device, windows, seq_len

    def __call__(self, folder: Path) -> Perplexity:
        """Of one folder, in float32."""
        decoder = load_model(open_checkpoint(folder), dtype=torch.float32, device=self.device)
        return perplexity(decoder, self.ids, self.seq_len, max_windows=self.windows)


def run_case(case: Case, args: argparse.Namespace, score: Scorer, source_nll: float) -> dict[str, Any]:
    """Convert, score, remove."""
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        out = Path(scratch) / "out"
        options: dict[str, Any] = {} if case.method == "rtn" else {"samples": args.samples, "seq_len": args.length}
        started = time.monotonic()
        convert_checkpoint(
            args.model,
            out,
            method=case.method,
            sym=case.sym,
            group_size=args.group_size,
            bits=args.bits,
            format=args.format,
            calibration=args.calibration,
            seed=case.seed,
            device=args.device,
            **options,
        )
        seconds = time.monotonic() - started
        if args.keep is not None:
            name = f"{case.method}-{'sym' if case.sym else 'asym'}-{case.seed}"
            shutil.copytree(out, args.keep / name, dirs_exist_ok=True)
        result = score(out)
    return {
        "method": case.method,
        "sym": case.sym,
        "seed": case.seed,
        "perplexity": round(result.perplexity, 4),
        "loss": round(result.nll - source_nll, 5),
        "seconds": round(seconds, 1),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over the seeds, by method and grid."""
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["method"], row["sym"]), []).append(row)
    return [
        {
            "method": method,
            "sym": sym,
            "mean": round(statistics.mean(row["perplexity"] for row in group), 3),
            "spread": round(max(r["perplexity"] for r in group) - min(r["perplexity"] for r in group), 3),
            "loss": round(statistics.mean(row["loss"] for row in group), 5),
            "seconds": round(statistics.mean(row["seconds"] for row in group), 1),
        }
        for (method, sym), group in found.items()
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with plain weights")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--sym", action="store_true", help="symmetric grids")
    parser.add_argument("--asym", action="store_true", help="asymmetric grids (the default)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--format", help="the format's grid restrictions apply; default: the method's")
    parser.add_argument("--calibration", type=Path, help="another text than the bundled one")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--text", type=Path, help="the text to score")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, help="folder for conversions; default: the system's")
    parser.add_argument("--keep", type=Path, help="copy the converted folders here")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Score the source, then every case."""
    args = parse()
    text = args.text.read_text(encoding="utf-8") if args.text else bundled_text("evaluation.txt")
    score = Scorer(args.model, text, args.device, args.windows, args.seq_len)
    source = score(args.model)
    grids = [sym for sym, wanted in ((False, args.asym or not args.sym), (True, args.sym)) if wanted]
    rows = []
    for sym in grids:
        for method in args.methods:
            for seed in args.seeds if method != "rtn" else args.seeds[:1]:
                rows.append(run_case(Case(method, sym, seed), args, score, source.nll))
                if not args.json:
                    print(rows[-1], flush=True)
    result = {
        "model": str(args.model),
        "text": str(args.text or "bundled evaluation.txt"),
        "calibration": str(args.calibration or "bundled calibration.txt"),
        "bits": args.bits,
        "group_size": args.group_size,
        "windows": source.windows,
        "seq_len": source.seq_len,
        "source_perplexity": round(math.exp(source.nll), 4),
        "rows": rows,
        "summary": summary(rows),
    }
    print(json.dumps(result) if args.json else json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()

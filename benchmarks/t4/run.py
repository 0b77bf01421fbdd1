"""The steps of benchmarks/t4/run.sh, each in a process of its own, and the report of them all.

A step that fails or takes too long is reported as that; the others run on. Everything found so far is in report.json
after every step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import report

HERE = Path(__file__).parent
STEPS = {
    "card": ("the card, its memory and its links", 120),
    "check": ("kernels and a small model against plain references", 600),
    "tests": ("the project's own GPU tests", 1200),
    "gemm": ("the packed matrix product", 600),
    "attention": ("attention on the paged cache", 600),
    "plan": ("what fits, and what is predicted", 120),
    "serving": ("serving, cache in float16", 1500),
    "serving_int8": ("serving, cache in int8", 900),
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, epilog="steps: " + ", ".join(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a dry run without a card")
    parser.add_argument("--quick", action="store_true", help="smaller loads, fewer sizes, without the GPU tests")
    parser.add_argument("--model", help="a model folder or hub id to serve instead of random weights")
    parser.add_argument("--shape", help="random weights of this shape (default: by the card's memory)")
    parser.add_argument("--memory-gib", type=float, help="most memory of the process; default: what the card allows")
    parser.add_argument("--only", default="", help="these steps alone, by commas")
    parser.add_argument("--skip", default="", help="without these steps, by commas")
    parser.add_argument("--out", type=Path, help="folder of the report (default: t4-report-TIME here)")
    options = parser.parse_args(given)
    for name in [*_names(options.only), *_names(options.skip)]:
        if name not in STEPS:
            parser.error(f"step {name!r} is not known; known are {', '.join(STEPS)}")
    options.out = (options.out or Path(f"t4-report-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
    return options


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def chosen(options: argparse.Namespace) -> dict[str, str | None]:
    """Step -> why it is left out, or None."""
    only, skip = _names(options.only), _names(options.skip)
    found: dict[str, str | None] = {}
    for name in STEPS:
        reason = None
        if (only and name not in only) or name in skip:
            reason = "not asked for"
        elif name == "tests" and options.quick:
            reason = "--quick"
        elif options.device == "cpu" and name in ("gemm", "attention", "tests", "serving_int8"):
            reason = "needs a CUDA device"
        found[name] = reason
    return found


def run_step(name: str, options: argparse.Namespace, limit: float) -> dict:
    """What the step found, with its status, "done", "failed" or "skipped", and its seconds."""
    result = options.out / f"step_{name}.json"
    result.unlink(missing_ok=True)
    task = {"device": options.device, "quick": options.quick, "model": options.model, "shape": options.shape}
    task |= {"memory_gib": options.memory_gib, "out": str(options.out), "result": str(result)}
    command = [sys.executable, str(HERE / "steps.py"), name, json.dumps(task)]
    start = time.monotonic()
    log = options.out / f"step_{name}.log"
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
            problem = f"ended with exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"was stopped after {limit:.0f} s"
    found = json.loads(result.read_text()) if result.is_file() else {}
    if problem is not None or not found:
        last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-3:]
        found |= {"status": "failed", "reason": problem or "left no result", "last_words": last}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    for name, reason in chosen(options).items():
        title, limit = STEPS[name]
        if reason is not None:
            results[name] = {"status": "skipped", "reason": reason}
            continue
        print(f"{name}: {title} ...", flush=True)
        results[name] = run_step(name, options, limit)
        words = {key: results[name][key] for key in ("reason", "last_words") if key in results[name]}
        print(f"{name}: {results[name]['status']} in {results[name]['seconds']:.0f} s", *words.values(), flush=True)
        report.save(results, options.out, quick=options.quick)
    problem = report.plot(results, options.out / "report.png")
    if problem:
        results["chart"] = {"status": "skipped", "reason": problem}
    report.save(results, options.out, quick=options.quick)
    print((options.out / "report.md").read_text(encoding="utf-8"))
    print(f"written: {options.out}/report.md, report.json" + ("" if problem else ", report.png"))
    return int(any(found["status"] == "failed" for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())

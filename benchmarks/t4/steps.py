"""One step of benchmarks/t4/run.py in this process: `steps.py NAME JSON`; the result is written as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path

import check
import micro

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPES = ((13.0, "llama-2-7b"), (7.0, "qwen2.5-7b"), (3.5, "qwen2.5-3b"), (0.0, "qwen2.5-1.5b"))
"""Smallest memory in GiB -> the shape that is served."""


class Skip(Exception):
    """The step cannot be taken here; the message says why."""


def card(task: dict) -> dict:
    """What is here, and whether it can be used."""
    import torch

    from qengine.cli import doctor
    from qengine.cli.version import versions

    findings: list[doctor.Finding] = []
    found = {"machine": doctor.describe_machine(), "versions": versions(), "python": sys.version.split()[0]}
    found["cards"] = doctor.describe_cards(findings)
    doctor.check_versions(found["versions"], findings)
    doctor.check_compiler(found["cards"], findings)
    if task["device"] == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device: " + "; ".join(f.text for f in findings))
        found |= micro.links()
        found["architectures"] = torch.cuda.get_arch_list()
    found["findings"] = [f.text for f in findings]
    bad = [f.text for f in findings if f.level == "error"]
    if bad:
        found |= {"status": "failed", "reason": "; ".join(bad)}
    return found


def checks(task: dict) -> dict:
    """Kernels against references, a model on this device against the CPU's reference."""
    rows = check.run(task["device"], quick=task["quick"])
    wrong = [row["name"] for row in rows if not row["ok"]]
    found: dict = {"rows": rows}
    if wrong:
        found |= {"status": "failed", "reason": f"{len(wrong)} of {len(rows)} checks: {', '.join(wrong)}"}
    return found


def tests(task: dict) -> dict:
    """`pytest -m gpu`."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise Skip("pytest is not installed (pip install -e '.[test]')") from None
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    print(done.stdout, done.stderr)
    found = {
        "summary": lines[-1] if lines else "",
        "failed": [line for line in lines if line.startswith("FAILED")][:20],
    }
    if done.returncode:
        found |= {"status": "failed", "reason": found["summary"] or f"pytest ended with {done.returncode}"}
    return found


def gemm(task: dict) -> dict:
    """Times of the four linears of a layer, beside the cost model's."""
    return micro.gemm(quick=task["quick"])


def attention(task: dict) -> dict:
    """Times of decode and prefill attention, beside the cost model's."""
    return micro.attention(quick=task["quick"])


def plan(task: dict) -> dict:
    """`qengine plan` of what will be served."""
    name, value = served(task)
    command = [*_cli("plan"), *([value] if name == "model" else ["--shape", value]), "--json"]
    if task["memory_gib"]:
        command += ["--memory", str(task["memory_gib"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(done.stderr.strip() or f"qengine plan ended with {done.returncode}")
    return {"plan": json.loads(done.stdout)}


def serving(task: dict) -> dict:
    """All loads with a float16 cache."""
    return _bench(task, "serving", "float16", "latency,ttft,streams,mixed,oversubscribed,async,startup")


def serving_int8(task: dict) -> dict:
    """The rates with an int8 cache."""
    return _bench(task, "serving_int8", "int8", "latency,ttft,streams,mixed")


def _bench(task: dict, name: str, cache: str, loads: str) -> dict:
    kind, value = served(task)
    out = Path(task["out"])
    command = [*_cli("bench"), *([value] if kind == "model" else ["--shape", value]), "--out", str(out), "--name", name]
    command += ["--loads", loads, "--device", task["device"]]
    if task["device"] == "cpu":
        command += ["--size", "quick", "--dtype", "float32", "--max-num-seqs", "8", "--pool-tokens", "128"]
    else:
        command += ["--size", "quick" if task["quick"] else "t4", "--dtype", "float16", "--kv-cache-dtype", cache]
        command += ["--pool-tokens", "1024" if task["quick"] else "4096"]
    if task["memory_gib"]:
        command += ["--memory-gib", str(task["memory_gib"])]
    code = subprocess.run(command, check=False).returncode
    path = out / f"{name}.json"
    found = {"report": json.loads(path.read_text())} if path.is_file() else {}
    if code:
        found |= {"status": "failed", "reason": f"qengine bench ended with {code}; what it measured before is kept"}
    return found


def served(task: dict) -> tuple[str, str]:
    """("model", folder) or ("shape", name): what is served on this device."""
    if task["model"]:
        return "model", task["model"]
    if task["shape"]:
        return "shape", task["shape"]
    if task["device"] == "cpu":
        folder = Path(task["out"]) / "tiny"
        if not folder.is_dir():
            from qengine.random_model import write_random_model

            write_random_model("tiny", folder)
        return "model", str(folder)
    import torch

    memory = task["memory_gib"] or torch.cuda.get_device_properties(0).total_memory / 2**30
    return "shape", next(shape for least, shape in SHAPES if memory >= least)


def _cli(command: str) -> list[str]:
    return [sys.executable, "-m", "qengine.cli.main", command]


ALL = {"card": card, "check": checks, "tests": tests, "gemm": gemm, "attention": attention, "plan": plan}
ALL |= {"serving": serving, "serving_int8": serving_int8}


def main(name: str, task: dict) -> int:
    try:
        found = {"status": "done"} | ALL[name](task)
    except Skip as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except Exception as error:  # whatever goes wrong is a line of the report
        traceback.print_exc()
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    Path(task["result"]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))

"""benchmarks/t4: the dry run on a CPU, what a step's failure does to the others, the report."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent.parent / "benchmarks" / "t4"


@pytest.fixture
def t4(monkeypatch):
    """Import a module of benchmarks/t4, and forget it after the test."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in ("run", "report", "steps", "check", "micro", "needs"):
        if name not in before:
            sys.modules.pop(name, None)


def shell(*arguments, **environment):
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    command = ["bash", str(HERE / "run.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_a_dry_run_without_a_card(tmp_path):
    done = shell("--device", "cpu", "--quick", "--only", "card,check,plan", "--out", tmp_path / "r")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "r" / "report.json").read_text())["steps"]
    assert {name: found["status"] for name, found in steps.items() if name in ("card", "check", "plan")} == {
        "card": "done",
        "check": "done",
        "plan": "done",
    }
    assert steps["gemm"]["status"] == steps["serving"]["status"] == "skipped"
    text = (tmp_path / "r" / "report.md").read_text()
    assert "1 of 1 checks within their limits" in text
    assert "fits" in text
    assert text.strip() in done.stdout


def test_without_a_card_it_says_where_to_get_one(tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexit 9\n")
    fake.chmod(0o755)
    done = shell(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "T4 GPU" in done.stderr
    assert "--device cpu --quick" in done.stderr


def test_help_and_wrong_steps():
    done = shell("--help")
    assert done.returncode == 0
    assert "--memory-gib" in done.stdout
    done = shell("--device", "cpu", "--only", "nothing")
    assert done.returncode == 2
    assert "step 'nothing' is not known" in done.stderr


def test_a_failing_or_slow_step_is_reported_and_the_rest_runs(t4, tmp_path, monkeypatch, capsys):
    run = t4("run")
    script = tmp_path / "steps.py"
    script.write_text(
        "import json, sys, time\n"
        "name, task = sys.argv[1], json.loads(sys.argv[2])\n"
        "print('last words of', name)\n"
        "if name == 'card': sys.exit(3)\n"
        "if name == 'check': time.sleep(60)\n"
        "open(task['result'], 'w').write(json.dumps({'status': 'done'}))\n"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "STEPS", {"card": ("a", 20), "check": ("b", 1.5), "plan": ("c", 20)})
    code = run.main(["--device", "cpu", "--out", str(tmp_path / "r")])
    assert code == 1
    steps = json.loads((tmp_path / "r" / "report.json").read_text())["steps"]
    assert steps["card"]["reason"] == "ended with exit status 3"
    assert steps["card"]["last_words"] == ["last words of card"]
    assert "was stopped after" in steps["check"]["reason"]
    assert steps["plan"]["status"] == "done"
    text = capsys.readouterr().out
    assert "| card | failed: ended with exit status 3 |" in text
    assert "| plan | done |" in text


def test_a_step_that_raises_leaves_its_reason(t4, tmp_path, monkeypatch):
    steps = t4("steps")
    result = tmp_path / "x.json"
    task = {"result": str(result), "device": "cpu", "quick": True}

    def skip(task):
        raise steps.Skip("no reason")

    def fail(task):
        raise ValueError("broken")

    for function, status, words in ((skip, "skipped", "no reason"), (fail, "failed", "ValueError: broken")):
        monkeypatch.setitem(steps.ALL, "card", function)
        assert steps.main("card", task) == 0
        assert json.loads(result.read_text()) == {"status": status, "reason": words}


def test_shapes_by_the_cards_memory(t4, monkeypatch):
    import torch

    steps = t4("steps")
    task = {"model": None, "shape": None, "device": "cuda", "memory_gib": 14.6}
    assert steps.served(task) == ("shape", "llama-2-7b")
    assert steps.served(task | {"memory_gib": 7.8}) == ("shape", "qwen2.5-7b")
    assert steps.served(task | {"memory_gib": 5.8}) == ("shape", "qwen2.5-3b")
    assert steps.served(task | {"shape": "qwen3-8b"}) == ("shape", "qwen3-8b")
    assert steps.served(task | {"model": "./m"}) == ("model", "./m")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("P", (), {"total_memory": 2 << 30}))
    assert steps.served(task | {"memory_gib": None}) == ("shape", "qwen2.5-1.5b")


def test_the_report_has_measured_beside_predicted(t4, tmp_path):
    report = t4("report")
    product = {"model": "M", "n": 8, "k": 16, "m": 1, "us": 30.0, "predicted_us": 20.0, "gb_per_s": 200.0}
    results = {
        "card": {"status": "done", "seconds": 1, "copy_gb_per_s": 250.0, "assumed_copy_gb_per_s": 283.0},
        "check": {"status": "failed", "reason": "1 of 2", "rows": [
            {"name": "good", "ok": True, "error": 0.0, "limit": 1.0},
            {"name": "bad", "ok": False, "error": 2.0, "limit": 1.0},
        ]},
        "gemm": {"status": "done", "rows": [product | {"tflop_per_s": 1.0}], "notes": ["a note"]},
        "attention": {"status": "done", "predictions": [40.0], "rows": [
            {"what": "decode", "heads": 32, "kv_heads": 8, "kind": "int8", "sequences": 4, "length": 128, "us": 50.0},
        ]},
        "tests": {"status": "skipped", "reason": "--quick"},
    }  # fmt: skip
    text = report.markdown(results, quick=True)
    assert "| M | 8 x 16 | 1 | 30.0 | 20.0 | 1.50 | 200 | 1.0 |" in text
    assert "| decode | 32 on 8 | int8 | 4 x 128 | 50.0 | 40.0 | 1.25 |" in text
    assert "copy on the card: 250 GB/s (the cost model assumes 283)" in text
    assert "* bad: error 2, limit 1" in text
    assert "A quick run" in text
    assert "| tests | skipped: --quick |" in text
    problem = report.plot(results, tmp_path / "r.png")
    assert problem == "matplotlib is not installed" or (tmp_path / "r.png").stat().st_size > 5000


def test_what_is_missing_is_named(t4, tmp_path):
    needs = t4("needs")
    found = needs.dependencies(HERE.parent.parent / "pyproject.toml")
    assert any(text.startswith("torch") for text in found)
    assert needs.missing(["torch>=2", "no-such-package>=1", "torch>=99", "x; python_version < '3'"]) == [
        "no-such-package>=1 is not installed",
        f"torch {needs.metadata.version('torch')} is installed, >=99 is needed",
    ]


def test_the_small_models_check_can_fail(t4, monkeypatch):
    check = t4("check")
    assert check.model("cpu")["ok"]
    good = check._logprobs
    calls = []

    def drifting(output):
        calls.append(1)
        return [value + 0.01 * len(calls) for value in good(output)]

    monkeypatch.setattr(check, "_logprobs", drifting)
    assert not check.model("cpu")["ok"]

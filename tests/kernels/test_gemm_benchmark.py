"""The GEMM benchmark's report is written from its JSON, and its run says which commit and command it was."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def one(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return one


def rows(**peers):
    shapes = ((12288, 4096), (4096, 4096))
    return [{"model": "Llama-2-7B", "n": n, "k": k, "m": m, **peers} for n, k in shapes for m in (1, 2048)]


def result(report, **peers):
    found = rows(**peers)
    about = {
        "gpu": "made-up",
        "copy_tb_per_s": 4.0,
        "torch": "t",
        "triton": "u",
        "commit": "c" * 40,
        "command": "run it",
    }
    return {**about, "peers": {"tinygemm": "torch t"}, "layers": report.sums(found), "rows": found}


def test_sums_add_the_linears_and_leave_out_a_peer_that_misses_one(load):
    report = load("gemm_report")
    found = rows(qengine=10.0, cublas_fp16=20.0, tinygemm=5.0)
    del found[0]["tinygemm"]
    small, large = report.sums(found)
    assert (small["qengine"], small["cublas_fp16"]) == (20.0, 40.0)
    assert "tinygemm" not in small
    assert large["tinygemm"] == 10.0


def test_the_table_has_ratio_and_goal(load):
    report = load("gemm_report")
    text = report.table(result(report, qengine=11.0, cublas_fp16=20.0))
    first = next(line for line in text.splitlines() if "| 1 |" in line)
    assert first == "| Llama-2-7B | 1 | 8.9 | 22.0 | 40.0 | 0.55 | 45 |"
    assert "1.08 of cuBLAS" in text


def test_the_report_fills_marked_places_only(load, tmp_path):
    report = load("gemm_report")
    first, last = report.MARKERS
    readme, plain = tmp_path / "README.md", tmp_path / "other.md"
    readme.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    plain.write_text("no marker\n")
    report.write(result(report, qengine=11.0, cublas_fp16=20.0), tmp_path, (readme, plain))
    text = readme.read_text()
    assert text.startswith(f"before\n{first}\n")
    assert text.endswith(f"{last}\nafter\n")
    assert "old" not in text
    assert "| Llama-2-7B | 1 |" in text
    assert "cccccccc" in text
    assert "`run it`" in text
    assert plain.read_text() == "no marker\n"
    assert "| Llama-2-7B | 1 |" in (tmp_path / "gemm.md").read_text()


def test_the_shipped_tables_are_those_of_the_shipped_json(load):
    report = load("gemm_report")
    shipped = json.loads((BENCHMARKS / "results" / "gemm.json").read_text())
    for again, kept in zip(report.sums(shipped["rows"]), shipped["layers"], strict=True):
        assert again == pytest.approx(kept)
    for name in ("gemm.md", "README.md"):
        assert report.table(shipped) in (BENCHMARKS / "results" / name).read_text(), "run benchmarks/gemm.py --report"


def test_the_commit_is_given_or_asked_of_git(load, monkeypatch):
    gemm = load("gemm")
    monkeypatch.setenv("QENGINE_COMMIT", "abc123")
    assert gemm.commit() == "abc123"
    monkeypatch.delenv("QENGINE_COMMIT")
    outputs = {"rev-parse": "f" * 40, "status": " M file"}

    def fake(command, **_):
        text = outputs[command[1]]
        return subprocess.CompletedProcess(command, 0 if text is not None else 128, stdout=text or "")

    monkeypatch.setattr(gemm.subprocess, "run", fake)
    assert gemm.commit() == "f" * 40 + "-dirty"
    outputs["status"] = ""
    assert gemm.commit() == "f" * 40
    outputs["rev-parse"] = None
    with pytest.raises(SystemExit, match="QENGINE_COMMIT"):
        gemm.commit()


def test_a_peer_that_is_not_installed_is_left_out_and_named(load, monkeypatch, capsys):
    gemm = load("gemm")
    monkeypatch.setattr(gemm.importlib.util, "find_spec", lambda name: None)
    assert list(gemm.versions_of(["tinygemm", "gemlite"])) == ["tinygemm"]
    assert "gemlite is not installed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not known"):
        gemm.versions_of(["marlin"])


def test_every_peer_is_timed_in_ascending_batches_and_checks_come_last(load, monkeypatch):
    gemm = load("gemm")
    order = []
    weight = type("Weight", (), {"nbytes": lambda self: 64 << 20})
    monkeypatch.setattr(gemm, "random_weight", lambda n, k, bits, group: weight())
    monkeypatch.setattr(gemm, "ours", lambda m, weights: ("qengine", m, len(weights)))
    monkeypatch.setattr(gemm, "cublas", lambda n, k: lambda m: ("cublas", m, n))
    monkeypatch.setitem(gemm.PEERS, "tinygemm", lambda n, k: lambda m: ("tinygemm", m, n))
    monkeypatch.setattr(gemm, "time_graph", lambda calls, replays: order.append(calls) or 1.5)
    monkeypatch.setattr(gemm, "check", lambda n, k: order.append(("check", n, k)) or 1e-4)
    found = gemm.measure(["tinygemm"], (1, 256, 2048))
    assert len(found) == 3 * 8
    assert all(row["error"] == 1e-4 and row["qengine"] == row["cublas_fp16"] == 1.5 for row in found)
    assert [row["m"] for row in found if "tinygemm" not in row] == [2048] * 8
    timed = [call for call in order[gemm.WARM_UP :] if call[0] == "qengine"][:12]
    assert [(m, sets) for _, m, sets in timed] == [(1, 4)] * 4 + [(256, 4)] * 4 + [(2048, 3)] * 4
    assert [call[0] for call in order[-8:]] == ["check"] * 8


def test_reporting_again_needs_no_gpu(tmp_path, load):
    report = load("gemm_report")
    (tmp_path / "gemm.json").write_text(json.dumps(result(report, qengine=11.0, cublas_fp16=20.0)))
    command = [sys.executable, str(BENCHMARKS / "gemm.py"), "--report", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert (tmp_path / "gemm.md").is_file()

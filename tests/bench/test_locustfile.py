"""benchmarks/locustfile.py in locust itself, without a page, for a few seconds against a server."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_openai import FakeOpenAI

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="needs locust: pip install 'qengine[bench]'"),
]


def locust(url, tmp_path, seconds=4, **environment):
    command = [
        sys.executable, "-m", "locust", "-f", ROOT / "benchmarks" / "locustfile.py", "--host", url, "--headless",
        "--users", "6", "--spawn-rate", "6", "--run-time", f"{seconds}s", "--csv", tmp_path / "run", "--only-summary",
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "QENGINE_MAX_TOKENS": "8", **environment},
    )  # fmt: skip
    with (tmp_path / "run_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    return done, rows


def test_both_users_and_their_times(tmp_path):
    server = FakeOpenAI(first=0.1, between=0.02, key="secret")
    with server as url:
        done, rows = locust(url, tmp_path, OPENAI_API_KEY="secret")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("chat", "completion"):
        first, each, whole = (rows[kind, name] for kind in ("TTFT", "TPOT", "E2E"))
        assert int(whole["Request Count"]) > 1
        assert int(whole["Failure Count"]) == 0
        assert 100 <= float(first["Median Response Time"]) < 200
        assert 20 <= float(each["Average Response Time"]) < 40
        assert float(whole["Median Response Time"]) > float(first["Median Response Time"])
    assert {"messages" in body for body in server.bodies} == {True, False}
    longest = max(len(body["messages"]) for body in server.bodies if "messages" in body)
    assert longest >= 4, "conversations grow"


@pytest.mark.parametrize("fault", ["500", "cut", "error"])
def test_failures_are_counted(tmp_path, fault):
    with FakeOpenAI(fault=lambda number, body: fault) as url:
        done, rows = locust(url, tmp_path, seconds=2)
    assert done.returncode == 1
    whole = rows["E2E", "completion"]
    assert int(whole["Failure Count"]) == int(whole["Request Count"]) > 0


def test_against_the_server(tmp_path):
    pytest.importorskip("fastapi")
    from http_server import running
    from tiny_llm import tiny_folder

    with running(str(tiny_folder(max_position_embeddings=2048)[1])) as server:
        done, rows = locust(server.url, tmp_path)
        server.wait_idle()
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("chat", "completion"):
        assert int(rows["E2E", name]["Request Count"]) > 1
        assert int(rows["E2E", name]["Failure Count"]) == 0

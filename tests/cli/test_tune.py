"""`qengine tune` with a timer that makes its times up: what is timed, printed, written, and read by later runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vectors import vector_path

from qengine.cli import tune
from qengine.cli.main import app
from qengine.errors import ConfigError
from qengine.kernels import launch
from qengine.kernels.launch import pick
from qengine.kernels.w4a16.tuning import Shape, TuningCard, first_round

ROOT = Path(__file__).resolve().parents[2]
T4 = TuningCard(75, 65536, 40, "made-up T4")


class FakeTimer:
    """Splits cost little, a tile of 32 outputs is best, and 8 x 64 cannot run."""

    def __init__(self):
        self.shapes, self.timed = [], []

    def prepare(self, shape):
        self.shapes.append(shape)

    def time(self, m, tried):
        self.timed.append((self.shapes[-1], m, tried))
        if (tried.bm, tried.bn) == (8, 64):
            return float("inf")
        return 10.0 + tried.bn / 32 + 0.1 * abs(tried.split - 3) + 0.01 * tried.prefetch


@pytest.fixture
def timer(monkeypatch, tmp_path):
    fake = FakeTimer()
    monkeypatch.setattr(tune, "_card", lambda: (T4, fake))
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path))
    launch.forget_tables()
    yield fake
    launch.forget_tables()


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)


def test_a_shape_is_tuned_and_later_picks_read_it(timer, tmp_path):
    before, other = (pick(1, 4096, 1024, 128, 75, 65536, sm_count=c) for c in (40, 68))
    result = run("4096x1024,512x1024", "--batches", "1,512")
    assert result.exit_code == 0
    assert timer.shapes == [Shape(4096, 1024, 4, 128), Shape(512, 1024, 4, 128)]
    path = tmp_path / "launch" / "sm75x40.json"
    table = json.loads(path.read_text())
    assert (table["sm"], table["count"], table["device"]) == (75, 40, "made-up T4")
    assert {(r["m"], r["n"]) for r in table["rows"]} == {(8, 4096), (512, 4096), (8, 512), (512, 512)}
    found = pick(1, 4096, 1024, 128, 75, 65536, sm_count=40)
    assert (found.bm, found.bn, found.prefetch) == (8, 32, 1) != (before.bm, before.bn, before.prefetch)
    best = min((t for t in timer.timed if t[:2] == (timer.shapes[0], 1)), key=lambda t: FakeTimer.time(timer, 1, t[2]))
    assert found == best[2]
    assert pick(1, 4096, 1024, 128, 75, 65536, sm_count=68) == other != found, "another card keeps its own"
    # a process of its own reads it too
    code = "from qengine.kernels.launch import pick; p = pick(1, 4096, 1024, 128, 75, 65536, sm_count=40); print(p)"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == str(found)


def test_the_terminal_shows_each_result_and_the_sum(timer):
    result = run("4096x1024", "--batches", "1,16")
    lines = result.stderr.splitlines()
    assert "made-up T4: 1 shapes, 2 batches each" in lines[0]
    assert [line.split()[:2] for line in lines if "was" in line and "warps" in line] == [
        ["4096x1024", "M=1"],
        ["4096x1024", "M=16"],
    ]
    assert "us before" in result.stderr
    assert "sm75x40.json" in result.stderr.replace("\n", "")


def test_what_pick_gives_now_is_timed_first_and_never_beaten_by_itself(timer):
    assert first_round(16, Shape(4096, 1024, 4, 128), T4)[0] == pick(16, 4096, 1024, 128, 75, 65536, sm_count=40)
    run("4096x1024", "--batches", "16")
    run("4096x1024", "--batches", "16")
    tried = [t[2] for t in timer.timed]
    assert min(tried, key=lambda t: FakeTimer.time(timer, 16, t)) == pick(16, 4096, 1024, 128, 75, 65536, sm_count=40)


def test_other_rows_of_the_table_stay(timer, tmp_path):
    run("4096x1024", "--batches", "1")
    run("512x1024", "--batches", "1", "--group-size", "32")
    rows = json.loads((tmp_path / "launch" / "sm75x40.json").read_text())["rows"]
    assert [(r["n"], r["group"]) for r in rows] == [(4096, 128), (512, 32)]


def test_a_table_of_another_card_or_no_table_is_refused(timer, tmp_path):
    other = tmp_path / "t.json"
    other.write_text(json.dumps({"sm": 90, "count": 132, "rows": []}))
    with pytest.raises(ConfigError, match="another file with --out"):
        run("4096x1024", "--batches", "1", "--out", str(other))
    other.write_text("[")
    with pytest.raises(ConfigError, match="not a launch table"):
        run("4096x1024", "--batches", "1", "--out", str(other))
    assert other.read_text() == "["


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["4096"], "NxK"),
        (["4100x12"], "multiples of 8"),
        (["64x64", "--batches", "0"], "whole numbers"),
        (["64x64", "--bits", "3"], "packed in 4 or 8"),
        (["64x64", "--group-size", "24"], "multiples of 16"),
    ],
)
def test_mistakes_are_named(timer, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)
    assert timer.timed == []


def test_a_model_is_tuned_for_the_products_that_its_loader_makes(timer):
    shapes = tune.model_shapes(str(vector_path("gptqmodel-gptq-w4-g64-sym")))
    config = json.loads((vector_path("gptqmodel-gptq-w4-g64-sym") / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    assert [(s.n, s.k) for s in shapes] == [
        (heads * size, hidden),
        (2 * inner, hidden),
        (hidden, config["num_attention_heads"] * size),
        (hidden, inner),
    ]
    assert {(s.bits, s.group) for s in shapes} == {(4, 64)}
    assert run(str(vector_path("gptqmodel-gptq-w4-g64-sym")), "--batches", "1").exit_code == 0
    assert timer.shapes == shapes


def test_layers_that_differ_are_all_tuned(timer):
    shapes = tune.model_shapes(str(vector_path("gptqmodel-gptq-dynamic")))
    assert len({(s.bits, s.group) for s in shapes}) > 1


def test_a_plain_model_and_a_machine_without_a_card_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        run("64x64")

"""`qengine bench`: the loads are vLLM's own, the figures are those of the runs, the report is whole."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qengine.bench import about, serving
from qengine.bench import report as reports
from qengine.bench.loads import FULL, QUICK, T4, Load, LoadMaker
from qengine.bench.measure import make_row, percentiles
from qengine.bench.reference import VLLM_H200, reference
from qengine.bench.startup import measure_startup, measure_startups
from qengine.cli.main import app
from qengine.errors import ConfigError, QEngineError
from qengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from qengine.random_model import write_random_model

ROOT = Path(__file__).parent.parent.parent
CPU = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("bench") / "tiny"
    write_random_model("tiny", target)
    return target


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_loads_are_those_that_vllm_ran():
    """The same draws in the same order as the script that measured vLLM, written out again."""
    draw = random.Random(0)

    def prompts(lengths):
        return tuple(tuple(draw.randrange(1000, 30000) for _ in range(n)) for n in lengths)

    prompts([128] * 4)
    latency = [prompts([128]), prompts([128])]
    ttft = [prompts([2000]), prompts([2000])]
    streams = prompts([256] * 32)
    lengths = [draw.randrange(32, 1024) for _ in range(256)]
    outputs = [draw.randrange(32, 512) for _ in range(256)]
    mixed = prompts(lengths)
    loads = LoadMaker(32000, FULL).vllm_loads()
    assert [load.prompts for load in loads["latency"][:2]] == latency
    assert [load.prompts for load in loads["ttft"][:2]] == ttft
    assert loads["streams"][0].prompts == loads["async"][0].prompts == streams
    assert loads["mixed"][0].prompts == mixed
    assert loads["mixed"][0].outputs == tuple(outputs)
    assert loads["latency"][0].outputs == (256,)
    assert loads["streams"][0].outputs == (256,) * 32
    assert len({load.prompts for load in loads["latency"]}) == 3


@pytest.mark.parametrize("sizes", [FULL, T4, QUICK])
def test_small_vocabularies_and_oversubscription(sizes):
    maker = LoadMaker(512, sizes)
    loads = maker.vllm_loads()
    tokens = {t for load in loads["mixed"] for prompt in load.prompts for t in prompt}
    assert min(tokens) >= 128
    assert max(tokens) < 512
    over = maker.oversubscribed(4096)
    assert over.prompt_tokens + over.output_tokens >= 4 * 4096
    warm = maker.warm_up(48)
    assert len(warm.prompts) == 48
    assert len(set(warm.outputs)) > 16


def finished(counts, start=0.0, preemptions=0):
    made = []
    for index, count in enumerate(counts):
        metrics = RequestMetrics(start, start + 0.1, start + 0.5, start + 0.5 + 0.2 * (count - 1), 0, preemptions)
        tokens = CompletionOutput(0, "", list(range(count)), finish_reason="length")
        made.append(RequestOutput(str(index), None, [1], [tokens], True, metrics=metrics))
    return made


def test_a_row_says_what_the_runs_were():
    runs = [Load("x", ((1, 2), (3,)), (4, 6))] * 3
    row = make_row(runs, [2.0, 8.0, 5.0], [finished([4, 6], preemptions=2)] * 3)
    assert row.output_tokens_per_s == 10 / 5.0
    assert row.total_tokens_per_s == 13 / 5.0
    assert row.ttft_ms == {"p50": pytest.approx(500), "p99": pytest.approx(500)}
    assert row.tpot_ms == {"p50": pytest.approx(200), "p99": pytest.approx(200)}
    assert row.preemptions == 4
    assert "tokens" not in row.as_json()
    with pytest.raises(QEngineError, match="1 of 2 requests did not get the tokens"):
        make_row(runs[:1], [1.0], [finished([4, 5])])


def test_percentiles():
    assert percentiles([3.0]) == {"p50": 3.0, "p99": 3.0}
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.5, "p99": 100.0}


def test_the_reference_is_only_for_its_own_card_model_and_cache():
    assert reference("random:llama-2-7b", "NVIDIA H200", "float16")["streams"] == 4913
    assert reference("/models/Llama-2-7B-AWQ", "NVIDIA H200", "int8")["mixed"] == 2192
    assert reference("random:llama-2-7b", "Tesla T4", "float16") is None
    assert reference("random:llama-2-7b", None, "float16") is None
    assert reference("random:mistral-7b", "NVIDIA H200", "float16") is None
    assert reference("random:qwen2.5-7b", "NVIDIA H200", "int8") is None
    assert set(VLLM_H200["qwen2.5-7b"]["float16"]) == {"latency", "streams", "mixed", "cache_tokens", "ttft_ms"}


def test_the_whole_benchmark_on_a_cpu(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("QENGINE_COMMIT", "abc123")
    loads = "latency,ttft,streams,mixed,oversubscribed,async"
    result = run(
        folder, *CPU, "--quick", "--loads", loads, "--pool-tokens", 128, "--out", tmp_path, "--name", "r", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "r.json").read_text())
    rows = {row["name"]: row for row in found["loads"]}
    assert set(rows) == set(loads.split(",")) - {"oversubscribed"} | {
        "oversubscribed_swap",
        "oversubscribed_recompute",
    }
    assert all(row["output_tokens_per_s"] > 0 for row in found["loads"])
    assert rows["mixed"]["requests"] == QUICK.mixed
    assert len(rows["latency"]["seconds"]) == 3
    assert rows["oversubscribed_swap"]["preemptions"] > 0
    assert "16 of 16 requests have the same tokens" in rows["oversubscribed_swap"]["note"]
    assert found["cache"]["tokens"] > 0
    assert found["commit"] == "abc123"
    assert found["card"] is None
    assert found["versions"]["torch"]
    assert found["settings"]["enable_prefix_caching"] is False
    text = (tmp_path / "r.md").read_text()
    assert "| one stream | 1 | 16 | 8 |" in text
    assert "oversubscribed, swap" in text
    assert (tmp_path / "r.png").exists() or "matplotlib is not installed" in result.stderr


def test_start_up_is_measured_in_a_process_of_its_own(folder, tmp_path):
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "swap_space": 0}
    found = measure_startup(str(folder), settings, tmp_path)
    assert 0 < found["import_s"] < found["load_s"] < found["first_token_s"]
    with pytest.raises(QEngineError, match="max_model_len"):
        measure_startup(str(folder), settings | {"max_model_len": -1}, tmp_path)


def test_a_warm_start_finds_what_the_start_before_it_compiled(monkeypatch):
    found = []

    def start(model, settings, cache):
        found.append((cache, sorted(file.name for file in cache.iterdir())))
        (cache / "kernel").touch()
        return {"first_token_s": 1.0}

    monkeypatch.setattr("qengine.bench.startup.measure_startup", start)
    assert [row["triton_cache"] for row in measure_startups("m", {})] == ["empty", "warm"]
    assert found[0][0] == found[1][0]
    assert [files for _, files in found] == [[], ["kernel"]]


def test_a_request_that_is_too_long_is_refused_with_the_numbers(folder):
    with pytest.raises(ConfigError, match="ttft: a request takes 97 tokens, max_model_len and the cache allow 64"):
        run(folder, *CPU, "--quick", "--loads", "ttft", "--max-model-len", 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model"),
        (("x", "--shape", "tiny"), "not both"),
        (("--shape", "lama-2-7b"), "did you mean 'llama-2-7b'"),
        (("x", "--loads", "latency,wrong"), "wrong: not known"),
        (("x", "--loads", ","), "loads=none"),
        (("x", "--size", "huge"), "size='huge'"),
        (("x", "--pool-tokens", 3), "pool_tokens=3"),
    ],
)
def test_mistakes_come_before_any_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_the_table_names_the_reference_where_there_is_one():
    load = {"name": "latency", "requests": 1, "prompt_tokens": 128, "output_tokens": 256, "seconds": [0.5], "note": ""}
    load |= {"output_tokens_per_s": 512.0, "total_tokens_per_s": 768.0, "ttft_ms": {"p50": 4.0, "p99": 4.0}}
    head = {"model": "m", "card": {"name": "NVIDIA H200", "memory_gib": 139.8}, "commit": "c", "device": "cuda:0"}
    whole = {
        **head,
        "versions": {"qengine": "0"},
        "loads": [load],
        "startup": [],
        "skipped": {"async": "no time"},
        "failed": {},
    }
    whole |= {"cache": {"tokens": 20000, "dtype": "float16", "block_size": 16}, "memory": {"peak_gib": None}}
    whole["reference"] = {"engine": "vLLM", "latency": 262, "cache_tokens": 19632}
    text = reports.markdown(whole)
    assert "| one stream | 1 | 128 | 256 | 0.50 | 512 | 768 | 4.0 | 262 |" in text
    assert "(vLLM 19,632)" in text
    assert "skipped async: no time" in text


def test_commit_of_the_checkout(monkeypatch):
    monkeypatch.delenv("QENGINE_COMMIT", raising=False)
    assert about.commit()
    monkeypatch.setattr(about.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert about.commit() == "unknown"


def test_the_script_runs_from_a_checkout():
    command = [sys.executable, str(ROOT / "benchmarks" / "serving.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--memory-gib" in done.stdout


def test_predicted_loads_follow_the_steps(monkeypatch):
    """With a cost of 10 ms a decode step and 1 ms a prompt token, the schedule can be counted by hand."""
    from types import SimpleNamespace

    from qengine.bench import predict

    monkeypatch.setattr(predict, "decode_step", lambda *a: SimpleNamespace(ms=10.0, attention_ms=2.0))
    monkeypatch.setattr(predict, "prefill_step", lambda card, model, tokens: SimpleNamespace(ms=float(tokens)))

    def seconds(load, **changes):
        served = {"pool_tokens": 1000, "max_num_seqs": 4, "max_num_batched_tokens": 8, "kv_bytes": 2.0} | changes
        return predict.Predictor(None, None, predict.Served(**served)).seconds(load)

    one = Load("one", ((0,) * 20,), (5,))
    assert seconds(one) == pytest.approx((8 + 8 + 4 + 4 * 10) / 1e3)
    two = Load("two", ((0,) * 6, (0,) * 6), (2, 2))
    # 6 + 2 tokens; then one decodes beside the other's last 4 (5 rows), then a last decode step
    assert seconds(two) == pytest.approx((8 + (5 + 2) + 10) / 1e3)
    apart = (6 + 10) * 2 / 1e3
    assert seconds(two, max_num_seqs=1) == pytest.approx(apart)
    assert seconds(two, pool_tokens=9) == pytest.approx(apart)


def test_predictions_need_a_known_card():
    from qengine.bench.predict import make_predictor

    assert "not one that the cost model knows" in make_predictor("random:tiny", {}, {}, int8_head=False)


def test_predictions_are_printed_beside(monkeypatch):
    from qengine.bench import predict
    from qengine.kernels.cost import CARDS
    from qengine.plan.cards import PlanCard

    monkeypatch.setattr(predict, "this_card", lambda: PlanCard("T4", CARDS["T4"], 14.6))
    cache = {"tokens": 20000, "dtype": "int8"}
    predictor = predict.make_predictor("random:llama-2-7b", cache, {}, int8_head=True)
    assert predictor.model.head.bits == 8
    assert predictor.served.kv_bytes == 1.0
    assert "no cache of fp4" in predict.make_predictor("random:tiny", cache | {"dtype": "fp4"}, {}, int8_head=False)
    load = {"name": "ttft", "requests": 1, "prompt_tokens": 9, "output_tokens": 1, "output_tokens_per_s": 2.0}
    load |= {"total_tokens_per_s": 20.0, "ttft_ms": {"p50": 500.0, "p99": 500.0}, "predicted_tokens_per_s": 4.0}
    [row] = reports.table_rows({"loads": [load]})
    assert dict(zip(reports.COLUMNS, row, strict=True))["predicted"] == "250.0 ms"


def test_a_load_that_fails_is_noted_and_the_others_run(folder, tmp_path, monkeypatch):
    real = serving.run_load

    def failing(llm, runs):
        if runs[0].name == "streams":
            raise MemoryError("no memory for so many")
        return real(llm, runs)

    monkeypatch.setattr(serving, "run_load", failing)
    monkeypatch.setattr(serving, "measure_startups", lambda *a, **k: (_ for _ in ()).throw(QEngineError("no start")))
    loads = "latency,streams,mixed,startup"
    result = run(folder, *CPU, "--quick", "--loads", loads, "--out", tmp_path, "--name", "f")
    assert result.exit_code == 1
    found = json.loads((tmp_path / "f.json").read_text())
    assert [row["name"] for row in found["loads"]] == ["latency", "mixed"]
    assert found["failed"] == {"streams": "MemoryError: no memory for so many", "startup": "QEngineError: no start"}
    assert "FAILED streams: MemoryError" in (tmp_path / "f.md").read_text()
    assert "FAILED streams" in result.stdout

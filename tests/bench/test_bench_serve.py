"""`qengine bench serve`: arrivals, requests, times, failures, goodput, the command, against a server of known times."""

import asyncio
import json
import math
import re
import statistics
from itertools import pairwise

import pytest
from fake_openai import FakeOpenAI
from typer.testing import CliRunner

from qengine.bench.serve import summary as summaries
from qengine.bench.serve.arrivals import arrival_times
from qengine.bench.serve.client import Outcome, has_tokens, message_of
from qengine.bench.serve.options import LoadOptions, parse_goodput, parse_lengths
from qengine.bench.serve.process import vocabulary
from qengine.bench.serve.prompts import random_jobs, read_pairs
from qengine.bench.serve.run import measure
from qengine.bench.serve.summary import summary
from qengine.cli.main import app
from qengine.errors import ConfigError, QEngineError

SMALL = {"num_prompts": 12, "input_len": (4, 9), "output_len": (2, 6), "warmup": 0}


def run(base_url, **options):
    return asyncio.run(measure(LoadOptions(base_url=base_url, **{**SMALL, **options})))


# What is sent, and when


def test_poisson_arrivals():
    times = arrival_times(4000, 50.0, 1.0, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    # an exponential distribution's deviation is its mean
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert times == arrival_times(4000, 50.0, 1.0, seed=3)
    assert times != arrival_times(4000, 50.0, 1.0, seed=4)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness):
    times = arrival_times(6000, 10.0, burstiness, seed=0)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.1)


def test_all_at_once():
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]


def test_random_requests_have_the_lengths_asked_for():
    options = LoadOptions(input_len=(3, 5), output_len=(7, 7), vocab_size=512, seed=1)
    jobs = random_jobs(options, 200)
    assert {len(job.prompt) for job in jobs} == {3, 4, 5}
    assert {job.output_tokens for job in jobs} == {7}
    assert max(token for job in jobs for token in job.prompt) < 512
    assert jobs == random_jobs(options, 200)


def test_a_sharegpt_file(tmp_path):
    turns = [
        [("system", "s"), ("human", "a b c"), ("gpt", "d e")],
        [("human", "word " * 99), ("gpt", "too long")],
        [("human", "no answer")],
    ]
    talk = [{"conversations": [{"from": who, "value": text} for who, text in one]} for one in turns] + [{"other": 1}]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(talk))
    assert read_pairs(path)[0] == ("a b c", "d e")
    with FakeOpenAI() as url:
        measured = run(url, dataset=path, endpoint="chat", num_prompts=3, ignore_eos=False)
    assert measured.left_out == 1
    assert [outcome.output_tokens for outcome in measured.outcomes] == [2, 2, 2]
    assert [outcome.prompt_tokens for outcome in measured.outcomes] == [3, 3, 3]


@pytest.mark.parametrize("content", [None, "{", "[]", '[{"conversations": 3}]'])
def test_a_wrong_file(tmp_path, content):
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"talk\.json"):
        read_pairs(path)


def test_what_a_request_holds():
    server = FakeOpenAI(key="secret")
    with server as url:
        run(url, num_prompts=1, api_key="secret", input_len=(4, 4), output_len=(3, 3), temperature=0.5)
        run(url, num_prompts=1, api_key="secret", endpoint="chat", ignore_eos=False)
        with pytest.raises(QEngineError, match="401: wrong API key"):
            run(url, api_key="other")
    first, second = server.bodies
    assert len(first.pop("prompt")) == 4
    assert first == {
        "model": "fake", "max_tokens": 3, "temperature": 0.5, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert "ignore_eos" not in second
    assert re.fullmatch(r"\d+( \d+)*", second["messages"][0]["content"])


# What is measured


def test_times_are_those_of_the_server():
    with FakeOpenAI(first=0.2, between=0.05) as url:
        measured = run(url, num_prompts=3, output_len=(5, 5), goodput=(("ttft", 300.0), ("tpot", 20.0)))
    report = summary(measured)
    latency = report["latency_ms"]
    assert 200 <= latency["ttft"]["p50"] < 290
    assert 50 <= latency["tpot"]["p50"] < 75
    assert 50 <= latency["itl"]["p50"] < 75
    assert 400 <= latency["e2e"]["p99"] < 560
    assert latency["e2e"]["max"] >= latency["e2e"]["p99"] >= latency["e2e"]["p90"] >= latency["e2e"]["p50"]
    assert report["output_tokens"] == 15
    assert report["output_tokens_per_s"] == pytest.approx(15 / report["seconds"])
    assert report["seconds"] == pytest.approx(0.4, abs=0.15)
    assert report["goodput"]["share"] == 0
    assert report["server_version"] == "1.2.3"
    assert report["tokens_counted_by"] == "usage"


def test_the_concurrency_limit():
    server = FakeOpenAI(first=0.05)
    with server as url:
        measured = run(url, max_concurrency=3)
    assert server.most_open == measured.most_open == 3
    report = summary(measured)
    # the last of twelve waited for nine others, three at a time; that is no part of its latency
    assert report["latency_ms"]["client_wait"]["max"] > 140
    assert report["latency_ms"]["ttft"]["max"] < 140


def test_requests_come_at_the_rate():
    with FakeOpenAI() as url:
        measured = run(url, num_prompts=20, request_rate=40.0)
    expected = arrival_times(20, 40.0, 1.0, 0)
    assert [outcome.sent for outcome in measured.outcomes] == pytest.approx(expected, abs=0.05)


def test_without_usage_chunks_are_counted_and_said_to_be():
    with FakeOpenAI(usage=False) as url:
        report = summary(run(url, output_len=(4, 4)))
    assert report["output_tokens"] == 48
    assert report["tokens_counted_by"] == "chunks for 12 of 12 requests"


FAULTS = {
    "429": ("http 429", "too many"),
    "500": ("http 500", "broken"),
    "cut": ("incomplete", "DONE"),
    "short": ("wrong length", "3 tokens came, 4"),
    "error": ("stream error", "the engine failed"),
    "drop": ("disconnected", ""),
    "hang": ("timeout", "not finished within 1 s"),
}


def test_every_failure_is_counted_by_kind():
    names = list(FAULTS)
    server = FakeOpenAI(fault=lambda number, body: names[number] if number < len(names) else None)
    with server as url:
        report = summary(run(url, output_len=(4, 4), timeout=1.0, goodput=(("ttft", 1e6),)))
    assert report["failed"] == len(FAULTS)
    assert report["succeeded"] == 12 - len(FAULTS)
    assert {kind: entry["count"] for kind, entry in report["failures"].items()} == {
        kind: 1 for kind, _ in FAULTS.values()
    }
    for kind, words in FAULTS.values():
        assert words in report["failures"][kind]["first"]
    # failed requests are no part of rates and latencies, but of goodput's share
    assert report["output_tokens"] == 4 * (12 - len(FAULTS))
    assert report["goodput"]["share"] == pytest.approx((12 - len(FAULTS)) / 12)


def test_no_server():
    with pytest.raises(QEngineError, match="is it running"):
        run("http://127.0.0.1:9")


def test_a_failing_warm_up_tells_why():
    with FakeOpenAI(vocab=100) as url, pytest.raises(QEngineError, match=r"outside the vocabulary.*--vocab-size"):
        run(url, warmup=1)


def test_goodput_counts_what_meets_every_limit():
    fast = Outcome(0.0, first=0.1, total=1.1, gaps=[0.5, 0.5], output_tokens=3)
    assert summaries.meets(fast, [("ttft", 100.0), ("tpot", 500.0), ("itl", 500.0), ("e2e", 1100.1)])
    for name, limit in (("ttft", 99.0), ("tpot", 499.0), ("itl", 499.0), ("e2e", 1099.0)):
        assert not summaries.meets(fast, [(name, limit)])
    assert not summaries.meets(Outcome(0.0, first=0.1, total=1.1, error="timeout"), [("ttft", 1e9)])


def test_small_readers():
    assert parse_lengths("32-512", "input_len") == (32, 512)
    assert parse_goodput(["ttft:500,tpot:50", "e2e:9"]) == (("ttft", 500.0), ("tpot", 50.0), ("e2e", 9.0))
    for wrong in ("ttft", "ttft:x", "other:5", "ttft:-1"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput([wrong])
    assert not has_tokens({"delta": {"role": "assistant", "content": ""}})
    assert has_tokens({"delta": {"reasoning": "hm"}})
    assert message_of('{"error": {"message": "no"}}') == message_of('{"error": "no"}') == "no"
    assert message_of("<html>\n502") == "<html> 502"
    assert (
        summaries.command(["/bin/qengine", "bench", "--api-key", "k", "--api-key=k"])
        == "qengine bench --api-key *** --api-key=***"
    )
    assert vocabulary("random:tiny") == 512
    assert vocabulary("some/model") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "x"}, {"base_url": "x"}, {"num_prompts": 0}, {"request_rate": 0}, {"burstiness": -1},
        {"max_concurrency": 0}, {"input_len": (5, 4)}, {"output_len": (0, 4)}, {"warmup": -1}, {"vocab_size": 1},
        {"request_rate": math.nan},
    ],
)  # fmt: skip
def test_wrong_options(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LoadOptions(**wrong)


def test_a_thousand_streams_at_once():
    """None is lost, and the client itself keeps up."""
    server = FakeOpenAI(first=0.5, between=0.01)
    with server as url:
        measured = run(url, num_prompts=1000, output_len=(5, 5))
    assert [outcome.error for outcome in measured.outcomes] == [None] * 1000
    assert {outcome.output_tokens for outcome in measured.outcomes} == {5}
    assert measured.most_open == 1000


# The command


def command(*arguments):
    result = CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command(tmp_path):
    with FakeOpenAI() as url:
        result = command(
            "--base-url", url, "--num-prompts", 5, "--input-len", "2-4", "--output-len", 3, "--out", tmp_path, "--json",
            "--goodput", "ttft:5000", "tpot:5000", "--api-key", "secret",
        )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "serve.json").read_text())
    assert report["goodput"]["limits_ms"] == {"ttft": 5000, "tpot": 5000}
    assert report["goodput"]["share"] == 1
    assert report["versions"]["python"]
    assert "secret" not in json.dumps(report)
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_where_a_request_does():
    with FakeOpenAI(fault=lambda number, body: "500" if number == 2 else None) as url:
        result = command("--base-url", url, "--num-prompts", 5, "--input-len", 2, "--output-len", 3)
    assert result.exit_code == 1
    assert "FAILED 1: http 500: broken" in result.stdout
    assert "4 succeeded, 1 failed" in result.stdout
    assert "first token" in result.stdout


@pytest.mark.parametrize("arguments", [["model"], ["--goodput", "ttft:5", "model"], ["--server-args", "--port 1"]])
def test_arguments_that_mean_nothing(arguments):
    with pytest.raises(ConfigError):
        command(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_started_for_the_run(tmp_path, endpoint):
    """`--start MODEL`: all tokens of all requests, on both endpoints, and nothing of the server is left."""
    pytest.importorskip("fastapi")
    from tiny_llm import tiny_folder

    folder = str(tiny_folder(max_position_embeddings=512)[1])
    result = command(
        "--start", folder, "--server-args", "--device cpu --swap-space 0 --num-gpu-blocks-override 256",
        "--endpoint", endpoint, "--num-prompts", 40, "--request-rate", 100, "--input-len", "8-64", "--output-len",
        "4-32", "--api-key", "secret", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stdout
    report = json.loads(result.stdout)
    assert report["succeeded"] == 40
    assert report["tokens_counted_by"] == "usage"
    assert report["finish_reasons"] == {"length": 40}
    assert report["server_version"]
    assert "secret" not in result.stdout

"""The server's metrics: what a request adds, what the engine's snapshot gives, the page's view, the GPU's part."""

import asyncio
import sys
import types
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from qengine.async_llm import AsyncLLM, RequestOutputKind
from qengine.engine import async_worker
from qengine.engine.stats import EngineStats
from qengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from qengine.sampling_params import SamplingParams
from qengine.server import gpu_metrics, metrics
from qengine.server.metrics import Facts, ServerMetrics
from qengine.server.tallies import Rate, Tally

LIMIT = 60
STATS = EngineStats(
    running=3, waiting=5, swapped=2, gpu_blocks=100, gpu_blocks_used=25, cpu_blocks=40, cpu_blocks_used=10,
    preemptions_swapped=4, preemptions_recomputed=1, blocks_out=6, blocks_in=5, bytes_out=600, bytes_in=500,
    prefix_queried_tokens=200, prefix_hit_tokens=150, cpu_hit_tokens=20, evicted_blocks=7, dropped_blocks=2,
    compiling=8,
)  # fmt: skip


class FakeEngine:
    """What ServerMetrics reads of an AsyncLLM."""

    def __init__(self):
        self.stats = STATS
        self.is_running, self.errored = True, False


@pytest.fixture
def clock(monkeypatch):
    """A time.monotonic that only moves when it is told to."""
    now = types.SimpleNamespace(value=1000.0)
    fake = types.SimpleNamespace(monotonic=lambda: now.value, time=lambda: 1.7e9 + now.value)
    monkeypatch.setattr(metrics, "time", fake)
    monkeypatch.setattr("qengine.server.live.time", fake)
    return now


@pytest.fixture
def served(monkeypatch, clock):
    monkeypatch.setattr(metrics, "read_facts", lambda llm: Facts(10, 20, 30, {"model": "m", "block_size": "16"}))
    made = ServerMetrics(FakeEngine(), CollectorRegistry())
    made._gpu = gpu_metrics.GpuReader(None)
    return made


def samples(made):
    """(name, labels without the model's) -> value, of everything that a scrape gets."""
    body, kind = made.text()
    assert kind.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def output(tokens, *, prompt=5, finished=False, timing=None, index=0):
    choice = CompletionOutput(index, "", list(tokens), finish_reason="stop" if finished else None)
    return RequestOutput("r-1", None, list(range(prompt)), [choice], finished, metrics=timing)


def test_a_streamed_request_is_counted_as_its_caller_sees_it(served, clock):
    record = served.begin("/v1/completions")
    timing = RequestMetrics(arrival_time=1000.01, first_scheduled_time=1000.03, first_token_time=1000.05)
    clock.value = 1000.06
    record.output(output([1], timing=timing))
    clock.value = 1000.16
    record.output(output([2, 3]))
    clock.value = 1000.2
    record.output(output([4], finished=True, timing=replace(timing, finished_time=1000.19)))
    record.end("length")
    record.end("abort")  # the first end counts
    found = samples(served)
    assert found["qengine:prompt_tokens_total", ()] == 5
    assert found["qengine:generation_tokens_total", ()] == 4
    assert found["qengine:requests_total", (("endpoint", "/v1/completions"),)] == 1
    assert found["qengine:request_success_total", (("finished_reason", "length"),)] == 1
    assert found["qengine:request_success_total", (("finished_reason", "stop"),)] == 0
    assert found["qengine:request_aborts_total", ()] == 0
    assert found["qengine:time_to_first_token_seconds_sum", ()] == pytest.approx(0.05)
    assert found["qengine:time_to_first_token_seconds_bucket", (("le", "0.04"),)] == 0
    assert found["qengine:time_to_first_token_seconds_bucket", (("le", "0.06"),)] == 1
    # two tokens that came together after 100 ms count as 50 ms each
    assert found["qengine:inter_token_latency_seconds_count", ()] == 3
    assert found["qengine:inter_token_latency_seconds_sum", ()] == pytest.approx(0.14)
    assert found["qengine:inter_token_latency_seconds_bucket", (("le", "0.075"),)] == 3
    assert found["qengine:e2e_request_latency_seconds_sum", ()] == pytest.approx(0.2)
    assert found["qengine:request_queue_time_seconds_sum", ()] == pytest.approx(0.02)
    assert found["qengine:request_prefill_time_seconds_sum", ()] == pytest.approx(0.02)
    assert found["qengine:request_decode_time_seconds_sum", ()] == pytest.approx(0.14)
    assert found["qengine:request_time_per_output_token_seconds_sum", ()] == pytest.approx(0.14 / 3)
    assert found["qengine:request_prompt_tokens_bucket", (("le", "5.0"),)] == 1
    assert found["qengine:request_generation_tokens_sum", ()] == 4


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_all_kinds_of_outputs_are_counted_alike(served, kind):
    record = served.begin("/generate", kind=kind)
    timing = RequestMetrics(1000.0, 1000.0, 1000.0, 1000.0)
    if kind is RequestOutputKind.DELTA:
        outputs = [output([1]), output([2, 3]), output([4], finished=True)]
    elif kind is RequestOutputKind.CUMULATIVE:
        outputs = [output([1]), output([1, 2, 3]), output([1, 2, 3, 4], finished=True)]
    else:
        outputs = [output([1, 2, 3, 4], finished=True)]
    for one in outputs:
        record.output(replace(one, metrics=timing))
    record.end("stop")
    found = samples(served)
    assert found["qengine:generation_tokens_total", ()] == 4
    assert found["qengine:prompt_tokens_total", ()] == 5
    assert found["qengine:time_to_first_token_seconds_count", ()] == 1
    streamed = 0 if kind is RequestOutputKind.FINAL_ONLY else 3
    assert found["qengine:inter_token_latency_seconds_count", ()] == streamed


def test_sequences_of_one_request_have_their_own_gaps(served, clock):
    record = served.begin("/v1/completions")
    for index, moment in ((0, 1000.0), (1, 1000.5), (0, 1001.0), (1, 1001.5)):
        clock.value = moment
        record.output(output([7], index=index))
    found = samples(served)
    assert found["qengine:inter_token_latency_seconds_count", ()] == 2
    assert found["qengine:inter_token_latency_seconds_sum", ()] == pytest.approx(2.0)


def test_aborts_and_errors(served):
    served.begin("/v1/completions").end("abort")
    served.begin("/v1/completions").error("server_error", 500)
    served.error("invalid_request_error", 400)
    served.error("invalid_request_error", 400)
    found = samples(served)
    assert found["qengine:request_aborts_total", ()] == 1
    assert found["qengine:request_errors_total", (("kind", "server_error"), ("status", "500"))] == 1
    assert found["qengine:request_errors_total", (("kind", "invalid_request_error"), ("status", "400"))] == 2
    assert found["qengine:requests_total", (("endpoint", "/v1/completions"),)] == 2
    assert found["qengine:e2e_request_latency_seconds_count", ()] == 0


def test_the_engines_counts(served):
    found = samples(served)
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 3, "num_requests_swapped": 2, "kv_cache_usage_perc": 0.25,
        "cpu_cache_usage_perc": 0.25, "prefix_cache_queries_total": 200, "prefix_cache_hits_total": 150,
        "prefix_cache_cpu_hits_total": 20, "evicted_blocks_total": 7, "dropped_blocks_total": 2, "healthy": 1,
        "num_requests_compiling": 8,
    }  # fmt: skip
    assert {name: found[f"qengine:{name}", ()] for name in expected} == expected
    assert found["qengine:num_preemptions_total", (("kind", "swap"),)] == 4
    assert found["qengine:num_preemptions_total", (("kind", "recompute"),)] == 1
    assert found["qengine:swap_bytes_total", (("direction", "out"),)] == 600
    assert found["qengine:swap_bytes_total", (("direction", "in"),)] == 500
    assert found["qengine:memory_bytes", (("kind", "cache"),)] == 20
    assert any(name == "qengine:cache_config_info" and ("block_size", "16") in labels for name, labels in found)
    assert not any(name.startswith("qengine:gpu_") for name, _ in found)


def test_before_the_engine_runs_and_after_it_failed(served):
    served._llm.stats = None
    served._llm.is_running = False
    found = samples(served)
    assert found["qengine:healthy", ()] == 0
    assert ("qengine:num_requests_running", ()) not in found
    assert served.live()["memory"]["weights"] is None
    served._llm.stats, served._llm.is_running, served._llm.errored = STATS, True, True
    assert samples(served)["qengine:healthy", ()] == 0


def test_the_pages_view(served, clock):
    for number in range(25):
        served.begin("/v1/chat/completions", request_id=f"chat-{number}")
    record = served.recent[-1]
    record.output(output([1, 2, 3], timing=RequestMetrics(1000.0, 1000.0, 1000.25)))
    clock.value = 1002.0
    served.recent[-2].end("abort")
    view = served.live()
    assert len(view["requests"]) == 20
    newest, other = view["requests"][:2]
    assert newest == {
        "id": "chat-24", "endpoint": "/v1/chat/completions", "state": "running", "started": 1.7e9 + 1000,
        "first_token_s": 0.25, "seconds": 2.0, "prompt_tokens": 5, "generation_tokens": 3,
    }  # fmt: skip
    assert other["state"] == "abort"
    assert view["tokens_per_s"] == {"prompt": 2.5, "generation": 1.5}
    assert view["memory"] == {"weights": 10, "cache": 20, "swap": 30, "cache_used": 0.25, "swap_used": 0.25}
    assert (view["running"], view["waiting"], view["swapped"]) == (3, 3, 2)
    assert "gpu" not in view


def test_tallies():
    tally = Tally((1, 2.5))
    for value in (0.5, 1, 2, 9):
        tally.add(value)
    assert tally.buckets() == [("1.0", 2), ("2.5", 3), ("+Inf", 4)]
    rate = Rate(window=2)
    assert rate.per_second(5.0) == 0
    rate.add(4, 10.5)
    rate.add(4, 10.9)
    rate.add(2, 12.0)
    assert rate.per_second(12.5) == pytest.approx(10 / 2.5)
    assert rate.per_second(14.0) == pytest.approx(2 / 2)
    assert rate.per_second(30.0) == 0


def fake_nvml(monkeypatch, **replaced):
    calls = types.SimpleNamespace(count=0)

    def utilization(handle):
        calls.count += 1
        return types.SimpleNamespace(gpu=93)

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": utilization,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=12, total=16),
    }
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**{**functions, **replaced}))
    properties = types.SimpleNamespace(uuid="abc", name="Tesla T4")
    monkeypatch.setattr(gpu_metrics.torch.cuda, "get_device_properties", lambda index: properties)
    return calls


def test_the_gpus_gauges(served, monkeypatch):
    calls = fake_nvml(monkeypatch)
    served._gpu = gpu_metrics.GpuReader(gpu_metrics.torch.device("cuda", 0))
    card = (("gpu", "0"), ("gpu_name", "Tesla T4"))
    found = samples(served)
    assert found["qengine:gpu_utilization_ratio", card] == 0.93
    assert found["qengine:gpu_memory_used_bytes", card] == 12
    assert found["qengine:gpu_memory_total_bytes", card] == 16
    assert served.live()["gpu"] == {"name": "Tesla T4", "utilization": 0.93, "used": 12, "total": 16}
    assert calls.count == 1, "a reading serves all who ask within a second"


def broken(*_):
    raise OSError("no driver")


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_card_that_cannot_be_read_has_no_gauges(served, monkeypatch, name):
    fake_nvml(monkeypatch, **{name: broken})
    served._gpu = gpu_metrics.GpuReader(gpu_metrics.torch.device("cuda", 0))
    for _ in range(2):
        assert not any(name.startswith("qengine:gpu_") for name, _ in samples(served))


def test_a_real_engine(monkeypatch):
    """Counts of requests that ran, and the snapshot of an idle engine, however seldom it is made while steps follow."""
    monkeypatch.setattr(async_worker, "STATS_SECONDS", 1e9)

    async def scenario():
        llm = AsyncLLM("random:tiny", skip_tokenizer_init=True, device="cpu", num_gpu_blocks_override=64, swap_space=0)
        made = ServerMetrics(llm)
        assert samples(made)["qengine:healthy", ()] == 0
        async with llm:
            for _ in range(2):
                record = made.begin("/v1/completions")
                params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
                prompt = {"prompt_token_ids": list(range(40))}
                async for one in llm.generate(prompt, params, output_kind=RequestOutputKind.DELTA):
                    record.output(one)
                record.end("length")
            await asyncio.sleep(0.2)
            found, view = samples(made), made.live()
            weights, seen = llm.llm.weight_bytes, llm.stats
            assert seen == await llm.call(lambda engine: engine.stats())
        return found, view, weights

    found, view, weights = asyncio.run(asyncio.wait_for(scenario(), LIMIT))
    assert found["qengine:healthy", ()] == 1
    assert found["qengine:generation_tokens_total", ()] == 16
    assert found["qengine:prompt_tokens_total", ()] == 80
    assert found["qengine:num_requests_running", ()] == 0
    assert found["qengine:prefix_cache_queries_total", ()] > 0
    assert found["qengine:prefix_cache_hits_total", ()] == 32
    assert found["qengine:time_to_first_token_seconds_count", ()] == 2
    assert found["qengine:request_time_per_output_token_seconds_count", ()] == 2
    assert found["process_resident_memory_bytes", ()] > 0
    assert found["qengine:memory_bytes", (("kind", "weights"),)] == weights
    # 2 layers, keys and values, 2 heads of 32 float32 numbers, 16 tokens a block
    assert found["qengine:memory_bytes", (("kind", "cache"),)] == 64 * 16 * 2 * 2 * 2 * 32 * 4
    assert view["model"] == "random:tiny"
    assert [one["generation_tokens"] for one in view["requests"]] == [8, 8]
    assert view["requests"][0]["first_token_s"] <= view["requests"][0]["seconds"]

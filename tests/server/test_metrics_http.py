"""GET /metrics and /stats of a server: what requests of every end add to them."""

import contextlib
import json
import time
import urllib.error
import urllib.request

import openai
import pytest
from http_server import running
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def server():
    with running(api_key="secret", max_body_size=2000) as made:
        yield made


def scrape(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
        assert not sample.name.startswith("qengine:") or sample.labels["model_name"] == "tiny"
        found[sample.name, tuple(labels.values())] = sample.value
    return found


def added(server, before):
    """What has changed since, gauges and times left out."""
    now = scrape(server)
    return {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request(server, stream):
    before = scrape(server)
    with server.client(api_key="secret") as client:
        answer = client.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=6, temperature=0, stream=stream, extra_body={"ignore_eos": True}
        )
        list(answer)
    found = added(server, before)
    assert found["qengine:prompt_tokens_total", ()] == 3
    assert found["qengine:generation_tokens_total", ()] == 6
    assert found["qengine:requests_total", ("/v1/completions",)] == 1
    assert found["qengine:request_success_total", ("length",)] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert found[f"qengine:{name}_seconds_count", ()] == 1
    assert ("qengine:request_errors_total", ("invalid_request_error", "400")) not in found


def test_a_client_that_leaves(server):
    before = scrape(server)
    with server.client(api_key="secret") as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=300, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    server.wait_idle()
    deadline = time.monotonic() + 10
    while ("qengine:request_aborts_total", ()) not in added(server, before) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = added(server, before)
    assert found["qengine:request_aborts_total", ()] == 1
    assert not any(name == "qengine:request_success_total" for name, _ in found)


def test_every_refusal_is_counted(server):
    before = scrape(server)
    with server.client(api_key="secret") as client, server.client(api_key="wrong") as stranger:
        for status, act in {
            400: lambda: client.completions.create(model="tiny", prompt="a", max_tokens=-1),
            404: lambda: client.completions.create(model="other", prompt="a"),
            413: lambda: client.completions.create(model="tiny", prompt="a" * 3000),
            401: lambda: stranger.completions.create(model="tiny", prompt="a"),
        }.items():
            with pytest.raises(openai.APIStatusError) as raised:
                act()
            assert raised.value.status_code == status
    with contextlib.suppress(urllib.error.HTTPError):
        request = urllib.request.Request(f"{server.url}/v1/completions", b"{", {"Authorization": "Bearer secret"})
        urllib.request.urlopen(request)
    found = added(server, before)
    errors = {labels[1]: value for (name, labels), value in found.items() if name == "qengine:request_errors_total"}
    assert errors == {"400": 2, "404": 1, "413": 1, "401": 1}
    assert ("qengine:requests_total", ("/v1/completions",)) not in found


def test_the_page_polls_without_prompts(server):
    with server.client(api_key="secret") as client:
        client.completions.create(model="tiny", prompt="hidden words", max_tokens=2)
    request = urllib.request.Request(f"{server.url}/stats", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    view = json.loads(text)
    assert "hidden" not in text
    newest = view["requests"][0]
    assert newest["id"].startswith("cmpl-")
    assert newest["state"] in ("length", "stop")
    assert newest["generation_tokens"] >= 1
    assert view["memory"]["weights"] > 0
    assert view["memory"]["cache"] > 0
    assert view["model"] == "tiny"

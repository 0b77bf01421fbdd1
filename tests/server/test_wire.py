"""Pieces of streams that go straight to their connections: the same bytes, for the same readers, counted alike."""

import json

import httpx
import pytest
from http_server import running, slow_down, wait_for

from qengine.server import wire

COMPLETION = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], **{k: v for k, v in COMPLETION.items() if k != "prompt"}}
FORMS = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "logprobs": 2, "echo": True}),
    ("/v1/completions", {**COMPLETION, "n": 3, "seed": 1, "temperature": 1.0}),
    ("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}),
    ("/generate", {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}),
]


@pytest.fixture
def written(monkeypatch):
    """Pieces that went by a wire."""
    pieces = []
    write = wire.Wire.write
    monkeypatch.setattr(wire.Wire, "write", lambda self, data: (pieces.append(data), write(self, data))[1])
    return pieces


@pytest.fixture
def no_wire(monkeypatch):
    """Calling it takes the wires away."""
    return lambda: monkeypatch.setattr("qengine.server.answers.wire_of", lambda scope: None)


def choices(server, path, body):
    """Choice -> (all its text, all its logprobs' values, its end), and the last usage of a stream."""
    texts, logprobs, ends, usage = {}, {}, {}, None
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        found = json.loads(line[6:])
        usage = found.get("usage") or usage
        for choice in found.get("choices", [found]):
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
            if choice.get("logprobs"):
                values = choice["logprobs"].get("token_logprobs") or [
                    x["logprob"] for x in choice["logprobs"]["content"]
                ]
                logprobs.setdefault(index, []).extend(values)
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    return texts, logprobs, ends, usage


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_streams_say_the_same_with_it_and_without(server, written, no_wire, path, body):
    found = choices(server, path, body)
    assert len(written) >= 3, "all but the first and the last; several steps in one on a busy machine"
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in written)
    no_wire()
    count = len(written)
    assert choices(server, path, body) == found
    assert len(written) == count


def test_of_several_prompts_none_goes_by_it(server, written):
    body = {**COMPLETION, "prompt": ["a", "b"]}
    texts, *_ = choices(server, "/v1/completions", body)
    assert set(texts) == {0, 1}
    assert not written


def test_tokens_are_counted(server, written):
    def counted():
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("qengine:generation_tokens_total"))

    before = counted()
    choices(server, "/v1/completions", COMPLETION)
    assert written
    assert counted() == before + 40
    assert server.state.metrics.recent[-1].output_tokens == 40
    assert server.state.metrics.recent[-1].reason == "length"


def test_a_form_that_fails_ends_its_request_alone(server, monkeypatch, written):
    from qengine.server.short_form import ShortPieces

    of = ShortPieces.of

    def failing(self, index, output):
        if written:
            raise ValueError("no such form")
        return of(self, index, output)

    monkeypatch.setattr(ShortPieces, "of", failing)
    with httpx.stream("POST", f"{server.url}/generate", json=FORMS[-1][1], timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert "error" in json.loads(lines[-2][6:])
    assert lines[-1] == "data: [DONE]"
    server.wait_idle()


def test_a_connection_serves_one_request_after_another(server, written):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = []
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
                lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
            found.append("".join(json.loads(line)["choices"][0]["text"] for line in lines))
            assert written
            written.clear()
            assert client.get("/health").json() == {"status": "ok"}
    assert found[0] == found[1] == found[2]


def test_the_servers_end_is_told_after_what_went_by_it(written):
    with running(drain_timeout=0.3) as server:
        slow_down(server, 0.02)
        lines = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**COMPLETION, "max_tokens": 400}) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    server.server.loop.call_soon_threadsafe(server.server.drain)
        lines = [line for line in lines if line]
        assert written
        assert json.loads(lines[-2][6:])["error"]["code"] == "shutting_down"
        assert lines[-1] == "data: [DONE]"
        wait_for(lambda: server.state.active == 0)

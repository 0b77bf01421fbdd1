"""Keys, sizes, counts, times, and clients that go away or read slowly."""

import json
import socket
import threading
import time

import httpx
import openai
import pytest
from http_server import running, slow_down, wait_for

from qengine import SamplingParams

LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def connect(server, body, *, buffer=None):
    """A raw connection that has sent a request."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    content = json.dumps(body).encode()
    made.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    )
    return made


@pytest.fixture(scope="module")
def slow_server():
    """One whose steps take 20 ms."""
    with running(max_concurrent_requests=3, api_key=("first", "second", "k\u00e9y"), max_body_size=20_000) as made:
        made.steps = slow_down(made, 0.02)
        yield made


@pytest.fixture
def headers():
    return {"Authorization": "Bearer first"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(stream):
    with running() as server:
        steps = slow_down(server, 0.02)
        free = server.free_blocks()
        connection = connect(server, {**LONG, "stream": stream})
        if stream:
            assert b"200 OK" in connection.recv(4096)
        wait_for(lambda: steps[0] >= 5)
        at = steps[0]
        connection.close()
        wait_for(lambda: not server.call(lambda engine: engine.has_unfinished()))
        assert steps[0] <= at + 3, "the step under way, and what a loaded machine lets pass"
        assert server.free_blocks() == free
        server.wait_idle()
        wait_for(lambda: server.state.active == 0)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_goes_away_changes_nothing_for_the_others(llm):
    wanted = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    with running() as server, server.client() as client:
        slow_down(server, 0.01)
        stream = client.completions.create(
            model="tiny", prompt="Hello", temperature=0, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        text = ""
        for count, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if count % 5 == 0:
                other = connect(server, {**LONG, "stream": count % 2 == 0})
                time.sleep(0.02)
                other.close()
                assert httpx.get(f"{server.url}/health").status_code == 200
        assert text == wanted[0].outputs[0].text
        server.wait_idle()


def test_all_prompts_of_a_request_end_with_their_client():
    with running() as server:
        steps = slow_down(server, 0.02)
        connection = connect(server, {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True})
        connection.recv(4096)
        connection.close()
        wait_for(lambda: not server.call(lambda engine: engine.has_unfinished()))
        assert steps[0] < 50
        server.wait_idle()


def test_a_slow_reader_slows_nobody_and_loses_nothing():
    request = {"prompt": "Hello", "max_tokens": 300, "seed": 1, "n": 16}
    with running(send_buffer=4096) as server, server.client() as client:
        whole = client.completions.create(model="tiny", extra_body={"ignore_eos": True}, **request)
        connection = connect(server, {**request, "ignore_eos": True, "stream": True}, buffer=4096)
        wait_for(lambda: server.state.active == 1)
        for _ in range(3):  # while it reads nothing
            client.completions.create(model="tiny", prompt="a", max_tokens=3)
        server.wait_idle(60)
        assert server.state.active == 1, "the engine has finished what nobody has read"
        client.completions.create(model="tiny", prompt="a", max_tokens=3)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    texts, chunks = [""] * 16, 0
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
                chunks += 1
    assert texts == [choice.text for choice in whole.choices]
    assert chunks < 16 * 300 / 2, "several steps in one chunk"


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
        ({"Authorization": "Bearer k\u00e9y".encode()}, 200),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
def test_keys(slow_server, given, status):
    answer = httpx.get(f"{slow_server.url}/v1/models", headers=given)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_what_needs_no_key(slow_server):
    for path, status in (("/health", 200), ("/metrics", 200), ("/version", 200), ("/", 200), ("/stats", 401)):
        assert httpx.get(f"{slow_server.url}{path}").status_code == status
    for path in ("/v1/completions", "/generate", "/tokenize", "/detokenize", "/v1/chat/completions"):
        assert httpx.post(f"{slow_server.url}{path}", json={"prompt": "a"}).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        slow_server.client().models.list()


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_are_too_large(slow_server, headers, declared):
    content = json.dumps({"prompt": "a" * 30_000}).encode()
    body = content if declared else (content[i : i + 1000] for i in range(0, len(content), 1000))
    answer = httpx.post(
        f"{slow_server.url}/v1/completions", content=body, headers={**headers, "Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    assert "--max-body-size" in answer.json()["error"]["message"]


def test_more_requests_than_allowed_are_told_to_come_back(slow_server, headers):
    url = f"{slow_server.url}/v1/completions"
    statuses = []

    def ask():
        answer = httpx.post(url, json={**LONG, "max_tokens": 30}, headers=headers, timeout=60)
        statuses.append((answer.status_code, answer.headers.get("Retry-After")))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses, key=str) == [(200, None)] * 3 + [(429, "1")] * 3
    wait_for(lambda: slow_server.state.active == 0)
    assert httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200


def test_a_request_that_takes_too_long():
    with running(request_timeout=0.3) as server:
        slow_down(server, 0.02)
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        with server.client() as client, pytest.raises(openai.APIError, match="request_timeout"):
            for _ in client.completions.create(model="tiny", prompt="a", max_tokens=400, stream=True):
                pass
        server.wait_idle()
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_requests_are_logged_only_when_asked_for(caplog):
    for asked in (False, True):
        caplog.clear()
        with running(log_requests=asked, max_log_len=6) as server, caplog.at_level("INFO", logger="qengine"):
            import logging

            logging.getLogger("qengine").propagate = True
            logging.getLogger("qengine").setLevel("INFO")
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "secret words", "max_tokens": 1})
        assert ("'secret'" in caplog.text) == asked
        assert "secret words" not in caplog.text


def test_origins():
    with running(allowed_origins=("https://a.example",)) as server:
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{server.url}/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(f"{server.url}/v1/completions", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers

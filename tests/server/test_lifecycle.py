"""Start and end: signals, draining, an engine that fails, a port that is taken."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from http_server import free_port, running, slow_down, tiny_model, wait_for

from qengine import LLM
from qengine.errors import ConfigError, QEngineError
from qengine.server.errors import as_api_error
from qengine.server.lifecycle import bind, check_tls
from qengine.server.settings import ServerSettings

SUPPORT = Path(__file__).resolve().parent.parent / "support"
LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
ON = {"ignore_eos": True}


@pytest.fixture
def launch():
    """launch(command): a process, which does not outlive the test."""
    processes = []

    def run(command):
        processes.append(_popen(command))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def _popen(command):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_ready(process, port):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, process.stdout.read()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server does not start")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_the_first_signal_drains_and_the_second_ends(launch, model, tmp_path):
    """The command itself, with its options from a file."""
    ports = [free_port(), free_port()]
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {model}\ndevice: cpu\ndtype: float32\nswap_space: 0\nserved-model-name: [one, two]\n")
    command = [sys.executable, "-m", "qengine.cli.main", "serve", "--config", str(file), "--port"]
    processes = [launch([*command, str(port)]) for port in ports]
    for process, port in zip(processes, ports, strict=True):
        wait_ready(process, port)
    url = f"http://127.0.0.1:{ports[0]}"
    assert [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]] == ["one", "two"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "n": 8, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        processes[0].send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert processes[0].wait(20) == 0, processes[0].stdout.read()

    url = f"http://127.0.0.1:{ports[1]}"
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "n": 256, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the connection is closed with it
        next(lines)
        processes[1].send_signal(signal.SIGTERM)
        time.sleep(0.3)
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(5) == 128 + signal.SIGTERM


def test_while_it_drains_nothing_new_is_taken_and_after_it_open_requests_end(model):
    with running(model, drain_timeout=1.5) as server:
        slow_down(server, 0.05)
        texts, failures = [], []

        def read():
            with server.client() as client:
                try:
                    for chunk in client.completions.create(
                        model="tiny", stream=True, prompt="a", max_tokens=400, extra_body=ON
                    ):
                        texts.append(chunk.choices[0].text)
                except openai.APIError as error:
                    failures.append(error)

        with httpx.Client(base_url=server.url) as kept:  # a connection from before
            assert kept.get("/health").status_code == 200
            thread = threading.Thread(target=read)
            thread.start()
            wait_for(lambda: texts)
            server.server.loop.call_soon_threadsafe(server.server.drain)
            wait_for(lambda: server.state.draining)
            codes = set()
            with contextlib.suppress(httpx.TransportError):  # once the listener is closed
                while True:
                    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
                    codes.add((answer.status_code, answer.json()["error"]["code"]))
            assert codes <= {(503, "shutting_down")}
            thread.join(20)
        server.stop()
        assert "the server stops" in str(failures[0])
        assert server.exit_code == 0


def test_an_engine_that_fails_ends_the_process(launch, model):
    port = free_port()
    process = launch([sys.executable, str(SUPPORT / "failing_server.py"), str(port), model, "40"])
    wait_ready(process, port)
    url = f"http://127.0.0.1:{port}"
    answers = []
    whole = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)))
    whole.start()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="engine is not running"):
        for _ in client.completions.create(model=model, prompt="a", max_tokens=400, stream=True, extra_body=ON):
            pass
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    whole.join(20)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_dead"
    assert process.wait(20) == 1
    assert "the device is gone" in process.stdout.read()


def test_a_request_that_meets_an_engine_just_closed_is_told_so(model):
    with LLM(model, device="cpu", dtype="float32", swap_space=0) as llm:
        pass
    with pytest.raises(QEngineError) as caught:
        _ = llm.engine
    error = as_api_error(caught.value)
    assert (error.status, error.code) == (503, "engine_dead")


def test_an_address_that_is_taken_is_refused_before_loading():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="give another --host or --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_health_is_bad_while_a_step_hangs(model):
    with running(model, health_timeout=0.2) as server:
        steps = slow_down(server, 1.0)
        thread = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30)
        )
        thread.start()
        wait_for(lambda: steps[0] >= 1)
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 503
        assert "within 0.2 s" in answer.json()["error"]["message"]
        thread.join()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_tls(tmp_path):
    with pytest.raises(ConfigError, match="PEM files"):
        check_tls(ServerSettings(ssl_certfile="nowhere.pem", ssl_keyfile="nowhere.key"))
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    with running(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        url = server.url.replace("http:", "https:")
        trusted = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{url}/health", verify=trusted).json() == {"status": "ok"}

"""kill -9 in the middle of a load: a server started again at once is ready after the work that the first start took.

Work is counted in processor seconds, for these do not depend on what else the machine does.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from http_server import free_port, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def started():
    """Processes, which do not outlive the test."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(model, port, started):
    """(process, processor seconds until /health is good)."""
    command = [
        sys.executable, "-m", "qengine.cli.main", "serve", model, "--port", str(port), "--device", "cpu", "--dtype",
        "float32", "--served-model-name", "tiny",
    ]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    started.append(process)
    while time.monotonic() < began + 120:
        assert process.poll() is None
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                spent = psutil.Process(process.pid).cpu_times()
                return process, spent.user + spent.system
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("it does not start")


async def load_and_kill(url, process, connections):
    """Streams under way when the process is killed; how many of them saw it."""
    cut = []

    async def one(client):
        body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
        except httpx.TransportError:
            cut.append(1)

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(one(client)) for _ in range(connections)]
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGKILL)
        await asyncio.gather(*tasks)
    return len(cut)


def test_it_is_back_in_its_start_up_time(started):
    model, port = tiny_model(), free_port()
    process, first = start(model, port, started)
    for _ in range(2):
        assert asyncio.run(load_and_kill(f"http://127.0.0.1:{port}", process, 64)) > 0
        process.wait(10)
        process, again = start(model, port, started)
        assert again < 1.3 * first + 1
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        assert answer.status_code == 200
    process.terminate()
    assert process.wait(20) == 0

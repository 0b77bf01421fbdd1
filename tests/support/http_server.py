"""A real server on a free port, in a thread of this process, over a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import openai
from tiny_llm import tiny_folder

from qengine.async_llm import AsyncLLM
from qengine.server.lifecycle import bind, serve
from qengine.server.settings import ServerSettings

ENGINE = {"device": "cpu", "dtype": "float32", "swap_space": 0}
LENGTH = 512


class RunningServer:
    """stop() drains and joins. url: without a slash. exit_code: set once it has ended."""

    def __init__(self, llm, send_buffer=None, **settings):
        settings.setdefault("served_model_name", ("tiny", "alias"))
        self.settings = ServerSettings(port=0, uvicorn_log_level="warning", **settings)
        self.llm = llm
        self.exit_code = None
        self._listener = bind("127.0.0.1", 0)
        if send_buffer is not None:  # of the kernel, for each connection
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(120), "the server did not start"
        while not self.server.started and self._thread.is_alive():
            time.sleep(0.01)

    def _main(self):
        with self._listener:
            self.exit_code = asyncio.run(serve(self.llm, self.settings, self._listener, self._take))

    def _take(self, server):
        self.server = server
        self._ready.set()

    @property
    def state(self):
        return self.server.state

    def client(self, **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def call(self, function):
        """function(engine), in the engine's thread."""

        async def run():
            return await self.llm.call(function)

        return asyncio.run_coroutine_threadsafe(run(), self.server.loop).result(60)

    def free_blocks(self):
        return self.call(lambda engine: engine.blocks.num_free)

    def wait_idle(self, seconds=20.0):
        """Until nothing runs or waits in the engine; checks its books."""
        end = time.monotonic() + seconds
        while self.call(lambda engine: engine.has_unfinished()):
            assert time.monotonic() < end, "requests are still under way"
            time.sleep(0.005)
        self.call(lambda engine: engine.check_integrity())

    def stop(self):
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self.server.loop.call_soon_threadsafe(self.server.drain)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tiny_model():
    """Its folder: 512 tokens, a chat template."""
    return str(tiny_folder(max_position_embeddings=LENGTH)[1])


@contextlib.contextmanager
def running(model=None, engine=None, **settings):
    """A server over the tiny model, or another, with these settings of engine and server."""
    made = RunningServer(
        AsyncLLM(model or tiny_model(), max_waiting_requests=None, **{**ENGINE, **(engine or {})}), **settings
    )
    try:
        yield made
    finally:
        made.stop()


def slow_down(server, seconds):
    """Make each step of the engine take so much longer; returns how many were taken, as it grows."""
    steps = [0]

    def patch(engine):
        launch = engine._runner.launch

        def slow(*args, **options):
            steps[0] += 1
            time.sleep(seconds)
            return launch(*args, **options)

        engine._runner.launch = slow

    server.call(patch)
    return steps


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)

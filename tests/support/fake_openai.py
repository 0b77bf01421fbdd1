"""A server with OpenAI's streaming API and nothing behind it: tokens by the clock, and faults on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web


class FakeOpenAI:
    """`with FakeOpenAI(...) as base_url`, in a thread of its own.

    first, between: seconds to the first token and between tokens. fault: (number of the request, body) -> None, or one
    of "429", "500", "cut" (no [DONE]), "short" (one token less), "error" (an error in the stream), "drop", "hang".
    key: asked for. usage: told at the end. vocab_size: token ids from it on are refused.
    """

    def __init__(self, *, first=0.0, between=0.0, fault=lambda number, body: None, key=None, usage=True, vocab=10**9):
        self.first, self.between, self.fault, self.key, self.usage, self.vocab = (
            first,
            between,
            fault,
            key,
            usage,
            vocab,
        )
        self.bodies = []
        self.open = self.most_open = 0

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *problem):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, started):
        async def main():
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application(client_max_size=1 << 24)
            app.add_routes([
                web.get("/v1/models", self.models), web.get("/version", self.version),
                web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize),
                web.post("/v1/completions", self.generate), web.post("/v1/chat/completions", self.generate),
            ])  # fmt: skip
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
            await site.start()
            self.port = runner.addresses[0][1]
            started.set()
            await self._stop.wait()
            await runner.cleanup()

        asyncio.run(main())

    async def models(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return refusal(401, "wrong API key")
        return web.json_response({"data": [{"id": "fake", "max_model_len": 100}]})

    async def version(self, request):
        return web.json_response({"version": "1.2.3"})

    async def tokenize(self, request):
        return web.json_response({"count": len((await request.json())["prompt"].split())})

    async def detokenize(self, request):
        return web.json_response({"prompt": " ".join(map(str, (await request.json())["tokens"]))})

    async def generate(self, request):
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.answer(request, body, self.fault(number, body))
        finally:
            self.open -= 1

    async def answer(self, request, body, fault):
        chat = "messages" in body
        prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
        if not chat and max((t for t in prompt if isinstance(t, int)), default=0) >= self.vocab:
            return refusal(400, "a token id is outside the vocabulary")
        if fault in ("429", "500"):
            return refusal(int(fault), "too many" if fault == "429" else "broken")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        count = body["max_tokens"] - (fault == "short")
        for index in range(count):
            await asyncio.sleep(self.between if index else self.first)
            if index == 1 and fault in ("error", "drop", "cut", "hang"):
                if fault == "hang":
                    await asyncio.sleep(3600)
                if fault == "error":
                    await send(response, {"error": {"message": "the engine failed"}})
                if fault == "drop":
                    request.transport.abort()
                return response
            last = "length" if index == count - 1 else None
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await send(response, {"choices": [{"index": 0, "finish_reason": last, **piece}]})
        if self.usage:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response, chunk):
    with contextlib.suppress(ConnectionError):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def refusal(status, message):
    return web.json_response({"error": {"message": message, "type": "x", "code": None}}, status=status)

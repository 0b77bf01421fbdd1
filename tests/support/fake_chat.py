"""A small server with the page and a chat API that answers what a test tells it to, slowly or wrongly if asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from qengine.server.pages import router

MODEL = "models/tiny-chat"


@dataclass
class Answer:
    """One answer: pieces of text (a pair's first is reasoning), or an error's status and fields."""

    pieces: list[str | tuple[str, str]] = field(default_factory=lambda: ["An ", "answer."])
    pause: float = 0.0
    finish: str = "stop"
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    break_off: bool = False
    endless: bool = False

    @classmethod
    def refusal(cls, status: int, message: str, retry_after: int | None = None, **error: Any) -> Answer:
        """An error of OpenAI's form."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return cls(status=status, error={"message": message, "type": "error", **error}, headers=headers)


class FakeChat:
    """What a test sets (`answers`, in order, then plain ones; `api_key`) and reads (`requests`, `aborted`)."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.requests: list[dict[str, Any]] = []
        self.aborted = 0
        self.api_key = ""
        self.models = [MODEL]
        self.stats: dict[str, Any] = live_figures()
        self.app = FastAPI()
        self.app.include_router(router)
        self.app.get("/v1/models")(self.list_models)
        self.app.get("/stats")(self.live)
        self.app.post("/v1/chat/completions")(self.complete)
        self.url = ""

    def refused(self, request: Request) -> Response | None:
        """401 where a key is asked for and another one came."""
        if not self.api_key or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return JSONResponse({"error": {"message": "this server needs an API key", "code": "invalid_api_key"}}, 401)

    async def list_models(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def live(self, request: Request) -> Response:
        return JSONResponse(self.stats)

    async def complete(self, request: Request) -> Response:
        refused = self.refused(request)
        if refused is not None:
            return refused
        self.requests.append(await request.json())
        answer = self.answers.popleft() if self.answers else Answer()
        if answer.status != 200:
            return JSONResponse({"error": answer.error}, answer.status, answer.headers)
        return StreamingResponse(self.stream(answer), media_type="text/event-stream")

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """Server-sent events. Counts an abort when the client goes away before the end."""
        done = False
        sent = 0
        try:
            while True:
                for piece in answer.pieces:
                    names = ["content"] if isinstance(piece, str) else ["reasoning", "reasoning_content"]
                    delta = dict.fromkeys(names, piece if isinstance(piece, str) else piece[0])
                    yield event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                    sent += 1
                    await asyncio.sleep(answer.pause)
                if not answer.endless:
                    break
            done = True
            if answer.break_off:
                return
            if answer.error:
                yield event({"error": answer.error})
                return
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
            usage = {"prompt_tokens": 12, "completion_tokens": sent, "total_tokens": 12 + sent}
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.aborted += not done

    @property
    def last(self) -> dict[str, Any]:
        """The body of the last request for an answer."""
        return self.requests[-1]


def event(content: dict[str, Any]) -> str:
    """A server-sent event with JSON."""
    return f"data: {json.dumps(content)}\n\n"


def live_figures() -> dict[str, Any]:
    """A body of GET /stats."""
    gib = 2**30
    request = {"endpoint": "/v1/chat/completions", "started": 1_790_000_000.0, "first_token_s": 0.12, "seconds": 2.1}
    counts = {"prompt_tokens": 812, "generation_tokens": 96}
    states = ("running", "stop", "length", "abort", "error")
    return {
        "model": MODEL,
        "healthy": True,
        "uptime_s": 812.0,
        "tokens_per_s": {"prompt": 1830.0, "generation": 412.7},
        "running": 3,
        "waiting": 1,
        "swapped": 0,
        "memory": {"weights": 4 * gib, "cache": 8 * gib, "swap": 4 * gib, "cache_used": 0.4, "swap_used": 0.1},
        "prefix_hit_rate": 0.83,
        "requests": [{"id": f"chatcmpl-{i}", "state": state, **request, **counts} for i, state in enumerate(states)],
        "gpu": {"name": "Tesla T4", "utilization": 0.93, "used": 13 * gib, "total": 15 * gib},
    }


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The app on a port of this machine, in a thread, until the block is left. Yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server ended while it started"
        assert time.monotonic() < deadline, "the server has not started within 20 seconds"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)

"""People who chat and programs that complete, over HTTP, with locust's page or without it.

    pip install 'qengine[bench]'
    qengine serve MODEL
    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8000                        # page at :8089
    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8000 --headless \\
        --users 50 --spawn-rate 5 --run-time 2m --csv serve                                # without

All answers are streamed. Beside locust's own rows, which end with the headers, there are for each kind of user:
`TTFT`, to the first token; `TPOT`, mean time a token after it; `E2E`, the whole answer. A request that fails on the way
is a failure of `E2E`. QENGINE_MODEL names the model (default: the first that the server lists), OPENAI_API_KEY the key,
QENGINE_MAX_TOKENS the longest answer (default 128).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from locust import between, task
from locust.contrib.fasthttp import FastHttpUser

MAX_TOKENS = int(os.environ.get("QENGINE_MAX_TOKENS", "128"))
TOPICS = (
    "why the sky is blue", "how a bicycle stays upright", "what a hash table is", "how bread rises",
    "why leaves turn red", "what a transformer model computes", "how tides come about", "why glass is transparent",
)  # fmt: skip
SYSTEM = {"role": "system", "content": "You are a patient teacher. Answer in a few sentences, without lists."}


class Streaming(FastHttpUser):
    """A user whose answers come as server-sent events."""

    abstract = True
    network_timeout = 600.0
    connection_timeout = 60.0

    def on_start(self) -> None:
        """Find the model, and say who we are."""
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = os.environ.get("QENGINE_MODEL") or self._first_model()

    def _first_model(self) -> str:
        answer = self.client.get("/v1/models", headers=self.headers)
        return str(answer.json()["data"][0]["id"])

    def stream(self, path: str, name: str, body: dict[str, Any]) -> str:
        """Send a request, report its times, return its text; "" if it failed."""
        body = body | {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": random.randint(max(1, MAX_TOKENS // 4), MAX_TOKENS), "temperature": 0.7,
        }  # fmt: skip
        start = time.perf_counter()
        text, first, last, tokens, error = "", None, start, 0, None
        try:
            for chunk in self._chunks(path, name, body):
                if "error" in chunk:
                    raise RuntimeError(chunk["error"].get("message", chunk["error"]))
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                piece = "".join(piece_of(choice) for choice in chunk.get("choices", ()))
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    text += piece
        except Exception as caught:  # whatever it is, it is this request's failure, and the user goes on
            error = caught
        self._report(name, start, first, last, tokens, error)
        return text if error is None else ""

    def _chunks(self, path: str, name: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answer's events. Raises if the server refuses, or the stream ends early."""
        with self.client.post(
            path, json=body, headers=self.headers, stream=True, catch_response=True, name=f"{name} {path}"
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
                raise RuntimeError(f"HTTP {answer.status_code}")
            done = False
            while line := bytes(answer.stream.readline(b"\n")):
                done = done or line.startswith(b"data: [DONE]")
                if line.startswith(b"data:") and not done:
                    yield json.loads(line[5:])
            if not done:
                raise RuntimeError("the stream ended without [DONE]")

    def _report(
        self, name: str, start: float, first: float | None, last: float, tokens: int, error: Exception | None
    ) -> None:
        """Rows of their own for the times that count."""

        def fire(kind: str, seconds: float, problem: Exception | None = None) -> None:
            self.environment.events.request.fire(
                request_type=kind, name=name, response_time=1e3 * seconds, response_length=tokens, exception=problem,
                context={},
            )  # fmt: skip

        if first is not None:
            fire("TTFT", first - start)
            if tokens > 1 and error is None:
                fire("TPOT", (last - first) / (tokens - 1))
        fire("E2E", time.perf_counter() - start, error)


class ChatUser(Streaming):
    """Talks: each question goes with all that was said before, so that the prefix cache has something to find."""

    weight = 2
    wait_time = between(1, 5)

    def on_start(self) -> None:
        """Begin a conversation."""
        super().on_start()
        self.messages: list[dict[str, str]] = [SYSTEM]

    @task
    def ask(self) -> None:
        """The next question; after a few, or a failure, a new conversation."""
        self.messages.append({"role": "user", "content": f"Explain {random.choice(TOPICS)}."})
        answer = self.stream("/v1/chat/completions", "chat", {"messages": self.messages})
        self.messages.append({"role": "assistant", "content": answer})
        if not answer or len(self.messages) > 7:
            self.messages = [SYSTEM]


class CompletionUser(Streaming):
    """A program: one prompt after the other, hardly a pause."""

    weight = 1
    wait_time = between(0.1, 0.5)

    @task
    def complete(self) -> None:
        """One prompt."""
        topic = random.choice(TOPICS)
        self.stream("/v1/completions", "completion", {"prompt": f"A short text on {topic}, number {random.random()}:"})


def piece_of(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice."""
    if "delta" in choice:
        return choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
    return choice.get("text") or ""

"""One streamed request to an OpenAI-style server, timed chunk by chunk; and the few questions a run asks beside.

aiohttp parses in C, which is what lets one process take a thousand streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from qengine.bench.serve.options import LoadOptions
from qengine.bench.serve.prompts import Job
from qengine.errors import QEngineError

BUFFER = 1 << 20
"""Bytes that a stream may hold unread. A chunk is read as soon as the loop comes to it."""


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds.

    arrived: when it was due, from the start of the run. waited: at the client, for --max-concurrency. first, total:
    from its sending to the first token and to the last. gaps: between the chunks with tokens. usage: whether the
    server told the counts of tokens; else output_tokens is the number of chunks. error: kind of failure, None for
    none; detail: what there was to read of it.
    """

    arrived: float
    waited: float = 0.0
    sent: float = 0.0
    first: float | None = None
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    usage: bool = False
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def per_token(self) -> float | None:
        """Mean seconds a token after the first; None for a single one."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.total - self.first) / (self.output_tokens - 1)


class Client:
    """Connections to one server, for one event loop; `async with`."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        # Requests run for as long as they like up to their own timeout, and as many at once as the load says.
        self._session = aiohttp.ClientSession(
            self.options.base_url.rstrip("/"),
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600),
            timeout=aiohttp.ClientTimeout(total=self.options.timeout, sock_connect=60),
            read_bufsize=BUFFER,
        )
        return self

    async def __aexit__(self, *problem: object) -> None:
        assert self._session is not None, "entered"
        await self._session.close()

    # Questions

    async def models(self) -> list[dict[str, Any]]:
        """What /v1/models lists. Raises QEngineError."""
        found = (await self._ask("GET", "/v1/models")).get("data")
        if not found:
            raise QEngineError(f"{self.options.base_url} lists no model; is it a server with OpenAI's API?")
        return list(found)

    async def version(self) -> Any:
        """What /version says; None where there is no such path."""
        try:
            return (await self._ask("GET", "/version")).get("version")
        except QEngineError:
            return None

    async def text(self, path: str) -> str:
        """What a path of the server says. Raises QEngineError."""
        assert self._session is not None, "entered"
        try:
            async with self._session.get(path) as answer:
                return await answer.text()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise QEngineError(f"{self.options.base_url}{path} cannot be asked: {error}; is it running?") from error

    async def count_tokens(self, text: str) -> int:
        """Tokens of a text, by /tokenize. Raises QEngineError."""
        body = {"model": self.options.model, "prompt": text}
        return int((await self._ask("POST", "/tokenize", body))["count"])

    async def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids, by /detokenize. Raises QEngineError."""
        body = {"model": self.options.model, "tokens": list(tokens)}
        return str((await self._ask("POST", "/detokenize", body))["prompt"])

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._session is not None, "entered"
        where = f"{self.options.base_url}{path}"
        try:
            async with self._session.request(method, path, json=body) as answer:
                if answer.status != 200:
                    raise QEngineError(f"{where} answers {answer.status}: {message_of(await answer.text())}")
                found = await answer.json(content_type=None)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            raise QEngineError(f"{where} cannot be asked: {type(error).__name__}: {error}; is it running?") from error
        return found if isinstance(found, dict) else {}

    # Requests

    def body(self, job: Job) -> dict[str, Any]:
        """The request as JSON."""
        options = self.options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": job.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True  # an extension of vLLM's that many servers have
        if options.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": job.prompt}]}
        return body | {"prompt": job.prompt if isinstance(job.prompt, str) else list(job.prompt)}

    async def run(self, job: Job, outcome: Outcome, clock: float) -> Outcome:
        """Send the request and read its stream to the end; whatever goes wrong is noted in the outcome."""
        assert self._session is not None, "entered"
        data = json.dumps(self.body(job)).encode()
        start = time.perf_counter()
        outcome.sent = start - clock
        try:
            async with self._session.post(
                self.options.path, data=data, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.status != 200:
                    outcome.error, outcome.detail = f"http {answer.status}", message_of(await answer.text())
                else:
                    await self._read(answer, outcome, start)
        except asyncio.TimeoutError:
            outcome.error, outcome.detail = "timeout", f"not finished within {self.options.timeout:g} s"
        except aiohttp.ClientConnectorError as error:
            outcome.error, outcome.detail = "connect", str(error)
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.detail = "disconnected", f"{type(error).__name__}: {error}"
        if outcome.error is not None:
            outcome.total = time.perf_counter() - start
        elif self.options.ignore_eos and outcome.output_tokens != job.output_tokens:
            outcome.error = "wrong length"
            outcome.detail = f"{outcome.output_tokens} tokens came, {job.output_tokens} were asked for"
        return outcome

    async def _read(self, answer: aiohttp.ClientResponse, outcome: Outcome, start: float) -> None:
        chunks, last, done = 0, start, False
        async for data in events(answer.content):
            now = time.perf_counter()
            if data == b"[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                outcome.error, outcome.detail = "stream error", message_of(data.decode())
                return
            if usage := chunk.get("usage"):
                outcome.usage = True
                outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in chunk.get("choices", ()):
                outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
                if not has_tokens(choice):
                    continue
                chunks += 1
                if outcome.first is None:
                    outcome.first = now - start
                else:
                    outcome.gaps.append(now - last)
                last = now
        outcome.total = last - start
        if not outcome.usage:
            outcome.output_tokens = chunks
        if not done:
            outcome.error, outcome.detail = "incomplete", "the stream ended without [DONE]"
        elif outcome.first is None:
            outcome.error, outcome.detail = "empty", "the stream held no token"


def has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice brings tokens: any of /v1/completions, a delta with content of /v1/chat/completions."""
    if "delta" not in choice:
        return True
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


async def events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events; comments and other fields are skipped."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def message_of(text: str) -> str:
    """The message of an error in OpenAI's shape, or the text's beginning."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return " ".join(text.split())[:300]

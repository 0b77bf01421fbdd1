"""Answers whose work goes on while they are sent: a whole JSON body, or a stream of server-sent events.

Both end their work when the client goes away, when the server's request_timeout is over, and when the server stops.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qengine.server.errors import ApiError, as_api_error
from qengine.server.state import ServerState
from qengine.server.watch import Ended, Watch
from qengine.server.wire import Wire, wire_of

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Of streams: proxies pass each event on at once."""


def dump(body: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def ended_error(reason: Ended) -> ApiError:
    """What a client is told whose request was ended."""
    if reason is Ended.TIMEOUT:
        return ApiError(reason.value, 504, code="timeout")
    return ApiError(reason.value, 503, code="shutting_down", retry=True)


class JSONAnswer(Response):
    """The body that `work()` returns, once it does; its error otherwise."""

    def __init__(self, state: ServerState, work: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(media_type="application/json")
        self._state = state
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        watch = Watch(receive, self._state.settings.request_timeout)
        error: ApiError | None = None
        body: Any = None
        try:
            with self._state.watched(watch):
                async with watch:
                    body = await self._work()
        except Exception as caught:
            error = as_api_error(caught)
        if watch.reason is Ended.DISCONNECT:
            return
        if watch.reason is not None and body is None:
            error = ended_error(watch.reason)
        if error is not None:
            self._state.count_error(error)
            await error.response()(scope, receive, send)
        else:
            await Response(dump(body), media_type="application/json")(scope, receive, send)


class EventStream(Response):
    """Events of `events()`, each already in the form of the wire; several may come joined. [DONE] follows the last.

    An error before the first event is answered as for any request, one after it is the stream's last event. What the
    client is slow to take is not asked for: the engine's outputs are merged meanwhile. `events` gets the connection, if
    that takes pieces of the body beside those that `events` gives, see Wire.
    """

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, events: Callable[[Wire | None], AsyncGenerator[bytes]]) -> None:
        super().__init__(headers=HEADERS)
        self._state = state
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        watch = Watch(receive, self._state.settings.request_timeout)
        error: ApiError | None = None
        self._started = False
        try:
            with self._state.watched(watch):
                async with watch:
                    await self._send_all(send, wire_of(scope))
        except Exception as caught:
            error = as_api_error(caught)
        if watch.reason is Ended.DISCONNECT:
            return
        if watch.reason is not None:
            error = ended_error(watch.reason)
        if error is not None:
            self._state.count_error(error)
            if not self._started:
                await error.response()(scope, receive, send)
                return
        last = DONE if error is None else b"data: " + dump(error.body()) + b"\n\n" + DONE
        await self._finish(send, last, watch.reason)

    async def _send_all(self, send: Send, wire: Wire | None) -> None:
        async with aclosing(self._events(wire)) as events:
            async for event in events:
                if not self._started:
                    headers = [item for item in self.raw_headers if item[0] != b"content-length"]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _finish(self, send: Send, last: bytes, reason: Ended | None) -> None:
        """Send the end; a reader that takes nothing does not hold a stopping server up."""
        sending = send({"type": "http.response.body", "body": last, "more_body": False})
        if reason is None:
            await sending
            return
        try:
            await asyncio.wait_for(sending, 1.0)
        except asyncio.TimeoutError:
            return

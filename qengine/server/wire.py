"""The body of a streamed answer, written to its connection past ASGI: some microseconds a token instead of tens."""

from __future__ import annotations

import weakref
from typing import Any

from starlette.types import Scope

NAME = "qengine.wire"
"""Of the entry in a scope's extensions."""


class Wire:
    """Pieces of one response's body, after its head and first piece have been sent through ASGI.

    cycle: uvicorn's httptools cycle of the request.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def open(self) -> bool:
        """Whether `write` may be called now: the client takes what it is sent, and the answer has begun."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, data: bytes) -> None:
        """Send a piece, of at least one byte, now; what the client is slow to take is kept by the transport."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def offer(scope: Scope, cycle: Any) -> None:
    """Let the application have the wire of a request of `cycle`, whose scope this is."""
    scope.setdefault("extensions", {})[NAME] = weakref.ref(cycle)  # the cycle holds the scope


def wire_of(scope: Scope) -> Wire | None:
    """The wire of a request, where its connection offers one: of uvicorn with httptools."""
    found = scope.get("extensions", {}).get(NAME)
    cycle = None if found is None else found()
    return None if cycle is None else Wire(cycle)

"""Connections whose request line and headers are bounded in bytes and seconds, which uvicorn's own are not.

Whoever can connect could else fill the memory with a header that never ends, or hold connections for ever with one that
comes a byte a minute: both before any key is looked at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from qengine.server.answers import dump
from qengine.server.errors import ApiError
from qengine.server.wire import offer

if TYPE_CHECKING:
    Base: Any = object
else:
    Base = AutoHTTPProtocol

HEAD_BYTES = 64 * 1024
"""Of a request line and its headers, where they come in several reads."""
HEAD_SECONDS = 30.0
"""From a connection's beginning, or from a further request's first byte, to the end of its headers."""


class BoundedHeads(Base):
    """uvicorn's protocol of a connection. A head that is too long is answered 431; one that is too slow ends it.

    Requests find a way to write to it in their scope: see wire.py.
    """

    _bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Of asyncio.Protocol."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or not self._in_head():
            self._rest()
            return
        self._bytes += len(data)
        if self._bytes > HEAD_BYTES:
            self._refuse()
        elif self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Of httptools."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # its task has not begun
            offer(self.scope, self.cycle)

    def _in_head(self) -> bool:
        """Whether what comes next belongs to a request's head."""
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _rest(self) -> None:
        self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        error = ApiError(f"the headers have more than {HEAD_BYTES} bytes; send fewer", 431, code="headers_too_large")
        body = dump(error.body())
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

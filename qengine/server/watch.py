"""Ends the work for a request whose client has gone, whose time is up, or whose server stops."""

from __future__ import annotations

import asyncio
import enum
from types import TracebackType

from starlette.types import Receive


class Ended(enum.Enum):
    """Why a request was ended before its answer was complete."""

    DISCONNECT = "the client has gone"
    TIMEOUT = "the request took longer than the server's request_timeout; ask for fewer tokens"
    SHUTDOWN = "the server stops; send the request again"


class Watch:
    """`async with Watch(receive, timeout)`: the block is cancelled, once, when one of these happens.

    The block ends then without an exception and `reason` says why. receive: of ASGI, after the body was read; what it
    gives next is that the client has gone. timeout: seconds, or None.
    """

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self.reason: Ended | None = None
        self._receive = receive
        self._timeout = timeout
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.current_task()
        self._listener = asyncio.create_task(self._listen())
        self._timer: asyncio.TimerHandle | None = None
        if self._timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self.end, Ended.TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        self._listener.cancel()
        if self._timer is not None:
            self._timer.cancel()
        ours = kind is asyncio.CancelledError and self.reason is not None
        if self.reason is not None and hasattr(task, "uncancel"):  # from Python 3.11 on cancellations are counted
            task.uncancel()  # type: ignore[union-attr]
        return ours

    def end(self, reason: Ended) -> None:
        """End the block now, unless it has ended."""
        if self._task is not None and self.reason is None:
            self.reason = reason
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(Ended.DISCONNECT)

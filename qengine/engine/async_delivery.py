"""Reports from the engine's thread into the event loop: one callback for all that came since the last one."""

from __future__ import annotations

import asyncio
import threading

from qengine.engine.async_commands import LoopClosed
from qengine.engine.async_stream import Progress, RequestStream

Report = tuple[RequestStream, Progress]

SHORT_SECONDS = 0.001
REST = 1.0
"""A delivery that took the event loop longer than SHORT_SECONDS, consumers included, is followed by REST times that
without one: with hundreds of streams the loop would else keep the engine's thread from Python. Reports are merged."""


class Delivery:
    """`send`, `hold` and `release` are called in the engine's thread, all else in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._reports: list[Report] = []
        self._held: list[Report] = []
        self._due = False
        self._gone = False

    def hold(self, reports: list[Report]) -> None:
        """Keep the reports for the next `send` or `release`. Raises LoopClosed if the last `release` found that."""
        if self._gone:
            raise LoopClosed
        self._held += reports

    def release(self) -> None:
        """Send what is held. Raises nothing: it is called in the midst of a step."""
        try:
            self.send([])
        except LoopClosed:
            self._gone = True

    def send(self, reports: list[Report]) -> None:
        """Have the event loop take the reports, in order, as soon as it can. Raises LoopClosed."""
        reports, self._held = [*self._held, *reports], []
        if not reports:
            return
        with self._lock:
            self._reports += reports
            if self._due:
                if self._loop.is_closed():  # before it came to the delivery
                    raise LoopClosed
                return
            self._due = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:
            raise LoopClosed from error

    def _deliver(self) -> None:
        """Hand the reports to their streams; the consumers run when this returns."""
        start = self._loop.time()
        with self._lock:
            reports, self._reports = self._reports, []
        for stream, progress in reports:
            stream.add(progress)
        self._loop.call_soon(self._delivered, start)

    def _delivered(self, start: float) -> None:
        """After the consumers have run: if that took long, let the engine's thread have the interpreter for a while."""
        spent = self._loop.time() - start
        if spent > SHORT_SECONDS:
            self._loop.call_later(REST * spent, self._deliver_rest)
        else:
            self._deliver_rest()

    def _deliver_rest(self) -> None:
        with self._lock:
            self._due = bool(self._reports)
        if self._due:
            self._deliver()

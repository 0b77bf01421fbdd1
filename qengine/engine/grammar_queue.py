"""Requests whose grammar is being compiled. They hold nothing and hold up nobody; the queues do not know them yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from qengine.engine.request import Request
from qengine.errors import RequestError


@dataclass
class _Waiting:
    request: Request
    compiled: Future[Any]
    deadline: float


class GrammarQueue:
    """In order of arrival. on_ready: called, in any thread, when one more may be ready; None: nobody is told."""

    def __init__(self) -> None:
        self.on_ready: Callable[[], None] | None = None
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return any(one.request is request for one in self._waiting)

    @property
    def num_sequences(self) -> int:
        """Sequences of all requests here."""
        return sum(one.request.params.n for one in self._waiting)

    @property
    def ready(self) -> bool:
        """True if `take` would find one."""
        now = time.monotonic()
        return any(one.compiled.done() or now >= one.deadline for one in self._waiting)

    def requests(self) -> list[Request]:
        """All that wait."""
        return [one.request for one in self._waiting]

    def add(self, request: Request, compiled: Future[Any], timeout: float) -> None:
        """Wait for `compiled`, for `timeout` seconds at most."""
        self._waiting.append(_Waiting(request, compiled, time.monotonic() + timeout))
        compiled.add_done_callback(lambda _: self._tell())

    def remove(self, request: Request) -> None:
        """Forget a request."""
        self._waiting = [one for one in self._waiting if one.request is not request]

    def take(self) -> list[tuple[Request, Any, RequestError | None]]:
        """(request, compiled form, None or why there is none) of those that need not wait any longer."""
        now, found, rest = time.monotonic(), list[tuple[Request, Any, RequestError | None]](), list[_Waiting]()
        for one in self._waiting:
            if one.compiled.done():
                found.append((one.request, *outcome(one.compiled)))
            elif now >= one.deadline:
                error = RequestError(
                    "structured_outputs takes too long to compile; simplify it, or raise structured_outputs_timeout"
                )
                found.append((one.request, None, error))
            else:
                rest.append(one)
        self._waiting = rest
        return found

    def wait(self, seconds: float) -> None:
        """Return when one is ready, or after this time."""
        if self._waiting:
            wait([one.compiled for one in self._waiting], seconds, FIRST_COMPLETED)

    def _tell(self) -> None:
        if self.on_ready is not None:
            self.on_ready()


def outcome(compiled: Future[Any]) -> tuple[Any, RequestError | None]:
    """(compiled form, None), or (None, the error) of a future that is done."""
    if compiled.cancelled():
        return None, RequestError("structured_outputs was not compiled: the engine is closing")
    error = compiled.exception()
    if error is None:
        return compiled.result(), None
    if not isinstance(error, RequestError):
        error = RequestError(f"structured_outputs cannot be compiled: {type(error).__name__}: {error}")
    return None, RequestError(str(error))

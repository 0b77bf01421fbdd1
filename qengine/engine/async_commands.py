"""What an event loop may ask of the engine's thread, and what it is told when the thread takes nothing more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from qengine.engine.async_stream import RequestStream
from qengine.engine.engine import Engine
from qengine.engine.prompts import Prompt
from qengine.errors import QEngineError
from qengine.sampling_params import SamplingParams


class EngineDeadError(QEngineError):
    """The engine failed, or was closed, and takes no more requests; `__cause__` is what went wrong."""


class LoopClosed(Exception):
    """The event loop is gone: nobody is left to compute for."""


class Served(Protocol):
    """What the thread loads: an engine, and how to give its memory back."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    def close(self) -> None:
        """End it and free its memory."""
        ...


@dataclass
class Submit:
    """Queue a request; its reports go to `stream`."""

    stream: RequestStream
    prompt: Prompt
    params: SamplingParams
    priority: int


@dataclass
class Abort:
    """End requests."""

    streams: list[RequestStream]
    done: Future[None]


@dataclass
class Call:
    """Run a function between two steps."""

    function: Callable[[Engine], Any]
    done: Future[Any]


@dataclass
class Stop:
    """End the thread: at once, or when all requests are finished."""

    drain: bool


Command = Submit | Abort | Call | Stop
"""What the mailbox holds."""


def resolve(done: Future[Any], value: Any, error: BaseException | None = None) -> None:
    """Set a future's outcome, unless whoever waited for it has gone."""
    if done.set_running_or_notify_cancel():
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

"""Ctrl-C that waits for the end of a change to the engine's books instead of cutting it in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """While it is open a first Ctrl-C waits; it raises KeyboardInterrupt at the end. A second one raises at once.

    Changes nothing outside the main thread, where no signal arrives, and where the program handles SIGINT itself (also
    inside another `uninterrupted`).
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt

"""How many requests may wait for their first token, and what happens to the next one."""

from __future__ import annotations

import asyncio

from qengine.errors import CapacityError, ConfigError


class QueueFullError(CapacityError):
    """Too many requests wait for their first token; try again later."""


class WaitingSlots:
    """Places of waiting requests, for one event loop.

    most: None is no limit. when_full: "wait" until a place is free, in order of arrival, or "refuse" with
    QueueFullError. Raises ConfigError for other values.
    """

    def __init__(self, most: int | None, when_full: str) -> None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(
                f"max_waiting_requests={most!r} is not allowed; give a whole number of at least 1, or None"
            )
        if when_full not in ("wait", "refuse"):
            raise ConfigError(f"when_full={when_full!r} is not allowed; give 'wait' or 'refuse'")
        self.taken = 0
        self._most = most
        self._refuses = when_full == "refuse"
        self._free = None if most is None else asyncio.Semaphore(most)

    async def take(self) -> None:
        """Wait for a place, or raise QueueFullError."""
        if self._free is not None:
            if self._refuses and self._free.locked():
                raise QueueFullError(
                    f"{self.taken} requests wait for their first token, max_waiting_requests={self._most} are "
                    "allowed; try again later, or raise it"
                )
            await self._free.acquire()
        self.taken += 1

    def give(self) -> None:
        """Give a place back."""
        self.taken -= 1
        if self._free is not None:
            self._free.release()

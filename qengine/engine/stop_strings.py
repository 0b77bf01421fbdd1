"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on, but never a part of a stop string.

    Text that may be the beginning of a stop string is held back until the next piece decides. The match that is
    complete first counts (of two that end together, the longer), so the cut does not depend on how text is split.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """Add a piece; returns what may be shown. Sets `matched` if a stop string ends in it (and `check`)."""
        if not self._stops:
            return text
        buffer = self._held + text
        if check:
            ends = []
            for stop in self._stops:
                start = buffer.find(stop, max(0, len(self._held) + 1 - len(stop)))
                if start >= 0:
                    ends.append((start + len(stop), start, stop))
            if ends:
                end, start, self.matched = min(ends)
                self._held = ""
                return buffer[: end if self._include else start]
        held = max(self._beginning(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The text held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop` without being all of it."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0

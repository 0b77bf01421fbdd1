"""Plain counts that the event loop adds to with each token: a histogram and a rate.

prometheus-client's own objects take a lock and some microseconds an observation, which at thousands of tokens a second
is time that the engine's thread waits for Python. These are read by `exposition.py` when a scrape asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate


class Tally:
    """A histogram: how many values were at most each of `bounds` (ascending), and the sum of all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it) as Prometheus has them, "+Inf" last."""
        names = [*map(repr, map(float, self.bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Rate:
    """Events a second over the last `window` seconds, counted by the second."""

    def __init__(self, window: int = 5) -> None:
        self._window = window
        self._seconds: deque[list[int]] = deque(maxlen=window + 1)

    def add(self, count: int, now: float) -> None:
        """Count `count` events at `now`, in seconds of a clock that does not go back."""
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += count
        else:
            self._seconds.append([second, count])

    def per_second(self, now: float) -> float:
        """Events a second from the first event in the window until `now`, but of a second at least."""
        recent = [(second, count) for second, count in self._seconds if second > now - self._window - 1]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(1.0, now - recent[0][0])

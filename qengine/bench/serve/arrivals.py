"""When requests arrive: a renewal process whose times between arrivals are gamma-distributed; Poisson's for shape 1."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, ascending, the first at 0. rate: arrivals a second; inf has all arrive at once.

    burstiness: the gamma distribution's shape; the mean time between arrivals is 1 / rate whatever it is.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times

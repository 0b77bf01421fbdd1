"""Cards by the names people use, and how much of their memory a process sees."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qengine.errors import ConfigError
from qengine.kernels.cards import CARDS, Card

USABLE_GIB = {"T4": 14.6, "A10": 22.0, "L4": 22.0, "A100 40GB": 39.4, "H200": 139.8}
"""What torch reports as the whole memory of cards whose makers count otherwise (error correction, 10^9 bytes)."""
GEFORCE_RESERVED_GIB = 0.2
"""What the driver keeps of a GeForce card; one that drives a screen has less."""
REFERENCE = "T4"


@dataclass(frozen=True)
class PlanCard:
    """A card to plan for. memory_gib: what a process finds; a part of it is its own by gpu_memory_utilization."""

    name: str
    card: Card
    memory_gib: float


def usable_gib(name: str) -> float:
    """GiB that a process finds on card `name` of CARDS."""
    return USABLE_GIB.get(name, CARDS[name].memory_gib - GEFORCE_RESERVED_GIB)


def find_card(name: str) -> PlanCard:
    """The card called `name`: "t4", "RTX 2060", "rtx2060", "2060", "a100". Raises ConfigError with the known ones."""
    wanted = _plain(name)
    keys = {key: _plain(key) for key in CARDS}
    exact = [key for key, plain in keys.items() if wanted in (plain, plain.removeprefix("rtx"))]
    found = exact or [key for key, plain in keys.items() if wanted and plain.startswith(wanted)]
    if len(found) != 1:
        why = "is not known" if not found else f"could be {' or '.join(found)}"
        raise ConfigError(f"gpu={name!r} {why}; known are {', '.join(CARDS)}; for another one give --memory GiB")
    return PlanCard(found[0], CARDS[found[0]], usable_gib(found[0]))


def this_card() -> PlanCard | None:
    """The card of this machine, if there is one and it is known."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    names = [key for key in CARDS if _plain(key) in _plain(properties.name)]
    if not names:
        return None
    best = max(names, key=len)
    return PlanCard(best, CARDS[best], properties.total_memory / 2**30)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("tesla").removeprefix("geforce")

"""What to ask of a server, and how: one dataclass with its checks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qengine.errors import ConfigError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOALS = ("ttft", "tpot", "itl", "e2e")
"""Latencies that `goodput` may limit: to the first token, per token after it, the longest gap, the whole request."""


@dataclass(frozen=True)
class LoadOptions:
    """One run.

    base_url: the server, without /v1. model: its name there; None for the first that the server lists. endpoint:
    "completions" or "chat". num_prompts: requests in all. request_rate: arrivals a second, inf for all at once.
    burstiness: shape of the gamma distribution of the times between them: 1 is Poisson's, below 1 in bursts, large is
    evenly spaced. max_concurrency: most requests under way, the others wait at the client. input_len, output_len:
    (least, most) tokens of random requests, drawn evenly. vocab_size: their token ids are below it. dataset: a
    ShareGPT-style file instead. ignore_eos: generate all the tokens asked for. temperature: of sampling. timeout:
    seconds for a whole request. goodput: limits in milliseconds by name of GOALS. seed: of lengths, tokens, arrivals.
    """

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: str = "completions"
    num_prompts: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: tuple[int, int] = (256, 256)
    output_len: tuple[int, int] = (128, 128)
    vocab_size: int = 30_000
    dataset: Path | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout: float = 600.0
    goodput: tuple[tuple[str, float], ...] = ()
    warmup: int = 1
    api_key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what does not depend on the server."""
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint={self.endpoint!r} is not known; give one of {', '.join(ENDPOINTS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r} is no address; give one like http://127.0.0.1:8000")
        for name in ("num_prompts", "request_rate", "burstiness", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not allowed; give a number above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} is not allowed; give 1 or more")
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup} is not allowed; give 0 or more")
        for name in ("input_len", "output_len"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name}={low}-{high} is not allowed; give a length, or the least and most: 32-512")
        if self.vocab_size < 8:
            raise ConfigError(f"vocab_size={self.vocab_size} is not allowed; give 8 or more")

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return ENDPOINTS[self.endpoint]

    def as_json(self) -> dict[str, Any]:
        """All but the key, ready for json.dump."""
        values = asdict(self) | {"goodput": dict(self.goodput), "dataset": self.dataset and str(self.dataset)}
        values["request_rate"] = "inf" if math.isinf(self.request_rate) else self.request_rate
        del values["api_key"]
        return values


def parse_lengths(text: str, name: str) -> tuple[int, int]:
    """ "256" or "32-512" as (least, most). Raises ConfigError."""
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no length; give a number, or the least and most: 32-512") from None


def parse_goodput(texts: list[str]) -> tuple[tuple[str, float], ...]:
    """Limits like "ttft:500", several by commas or blanks. Raises ConfigError."""
    goals: dict[str, float] = {}
    for item in (part for text in texts for part in text.replace(",", " ").split()):
        name, _, limit = item.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = math.nan
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(
                f"goodput={item!r} is not allowed; give NAME:MILLISECONDS, like ttft:500, NAME one of "
                f"{', '.join(GOALS)}"
            )
    return tuple(goals.items())

"""What is asked of the engine: the loads that vLLM was measured with, request by request, and the oversubscribed one.

All prompts and lengths come from one `random.Random(0)` in a fixed order, whichever loads are then run, so that every
engine that is given the same seed and vocabulary gets the same tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

FIRST_TOKEN, LAST_TOKEN = 1000, 30000
"""Token ids are drawn from here where the vocabulary has them."""
NAMES = ("latency", "ttft", "streams", "mixed", "oversubscribed", "async", "startup")
"""The loads, in the order in which they are run."""
ABOUT = {
    "latency": "one stream, 128 tokens in, 256 out",
    "ttft": "a prompt of 2,000 tokens, time to its first token",
    "streams": "32 requests at once, 256 in, 256 out",
    "mixed": "256 requests at once, prompts of 32 to 1,023 and outputs of 32 to 511 tokens",
    "oversubscribed": "four times more tokens than the cache holds, with CPU swap and with recomputation",
    "async": "the 32 requests through AsyncLLM",
    "startup": "from the process's start to the first token, with a warm and with an empty Triton cache",
}


@dataclass(frozen=True)
class Load:
    """Requests that arrive together. prompts: token ids. outputs: tokens to generate, for each prompt."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        """Tokens to generate in all."""
        return sum(self.outputs)


@dataclass(frozen=True)
class Sizes:
    """How large the loads are; the defaults are those that vLLM was measured with."""

    latency_in: int = 128
    latency_out: int = 256
    ttft_in: int = 2000
    streams: int = 32
    streams_in: int = 256
    streams_out: int = 256
    mixed: int = 256
    mixed_in: tuple[int, int] = (32, 1024)
    mixed_out: tuple[int, int] = (32, 512)
    oversubscribed_in: int = 256
    oversubscribed_out: int = 256


FULL = Sizes()
T4 = Sizes(latency_out=128, streams=16, streams_out=128, mixed=48, mixed_in=(32, 512), mixed_out=(32, 256))
"""For a card a fifteenth as fast as an H200: minutes in all."""
QUICK = Sizes(
    latency_in=16, latency_out=8, ttft_in=96, streams=4, streams_in=16, streams_out=8, mixed=6, mixed_in=(4, 24),
    mixed_out=(2, 12), oversubscribed_in=16, oversubscribed_out=16,
)  # fmt: skip
"""To see that everything works."""


class LoadMaker:
    """Makes the loads of one size and vocabulary; `vllm_loads` first, as vLLM's run did."""

    def __init__(self, vocab_size: int, sizes: Sizes = FULL, seed: int = 0) -> None:
        self.sizes = sizes
        self._random = random.Random(seed)
        self._low, self._high = FIRST_TOKEN, min(LAST_TOKEN, vocab_size)
        if self._high <= self._low:
            self._low, self._high = vocab_size // 4, vocab_size

    def _tokens(self, lengths: list[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._random.randrange(self._low, self._high) for _ in range(n)) for n in lengths)

    def _load(self, name: str, lengths: list[int], outputs: list[int]) -> Load:
        return Load(name, self._tokens(lengths), tuple(outputs))

    def vllm_loads(self) -> dict[str, list[Load]]:
        """Name -> its runs, prompts drawn in the order of the run that measured vLLM."""
        s = self.sizes
        self._tokens([128] * 4)  # that run's warm-up
        latency = [self._load("latency", [s.latency_in], [s.latency_out]) for _ in range(2)]
        ttft = [self._load("ttft", [s.ttft_in], [1]) for _ in range(2)]
        streams = self._load("streams", [s.streams_in] * s.streams, [s.streams_out] * s.streams)
        lengths = [self._random.randrange(*s.mixed_in) for _ in range(s.mixed)]
        outputs = [self._random.randrange(*s.mixed_out) for _ in range(s.mixed)]
        mixed = self._load("mixed", lengths, outputs)
        # The prompts of the first runs again would be the same work; two more of each make a median.
        latency.append(self._load("latency", [s.latency_in], [s.latency_out]))
        ttft += [self._load("ttft", [s.ttft_in], [1]) for _ in range(3)]
        return {
            "latency": latency,
            "ttft": ttft,
            "streams": [streams],
            "mixed": [mixed],
            "async": [replace(streams, name="async")],
        }

    def oversubscribed(self, pool_tokens: int, times: int = 4) -> Load:
        """Requests of equal size that need `times` the tokens of the pool."""
        s = self.sizes
        count = max(times, -(-times * pool_tokens // (s.oversubscribed_in + s.oversubscribed_out)))
        return self._load("oversubscribed", [s.oversubscribed_in] * count, [s.oversubscribed_out] * count)

    def warm_up(self, most: int) -> Load:
        """Short requests that end one after the other, so that every batch size up to `most` is computed once."""
        stride = max(1, most // 32)
        return self._load("warm-up", [16] * most, [2 + index // stride for index in range(most)])

    def warm_up_mixed(self) -> Load:
        """A third of the mixed load with other prompts and short outputs: it meets the shapes that the load will meet.

        What a machine does once (compiling a kernel, capturing a graph) is not part of what is measured.
        """
        s = self.sizes
        count = max(1, s.mixed // 3)
        lengths = [self._random.randrange(*s.mixed_in) for _ in range(count)]
        outputs = [
            self._random.randrange(s.mixed_out[0], max(s.mixed_out[0] + 1, s.mixed_out[1] // 4)) for _ in lengths
        ]
        return self._load("warm-up", lengths, outputs)

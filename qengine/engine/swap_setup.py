"""The size of the CPU tier and its cost model: both measured when an engine starts."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Protocol

import torch

from qengine.config import CacheConfig, EngineConfig
from qengine.engine.startup_steps import GREEDY, prompts
from qengine.engine.step import StepRunner
from qengine.engine.swap import SwapSpace
from qengine.engine.swap_policy import LATE_SECONDS, SwapPolicy

GIB = 1024**3
MEMORY_SHARE = 0.5
"""Most of the CPU memory that is free when the engine starts that the CPU tier takes."""


PREFILL_TOKENS = {"cuda": 512, "cpu": 32}
"""Most tokens of the prompt that is timed, by the kind of device."""


class SwappingRunner(StepRunner, Protocol):
    """What the set-up needs of a runner."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block over all layers."""
        ...

    def open_swap(self, num_cpu_blocks: int, memory: torch.Tensor | None = None) -> SwapSpace:
        """Take CPU memory for so many blocks; `run` carries out swap orders from now on."""
        ...

    def at_close(self, call: Callable[[], None]) -> None:
        """Call this first when the runner is closed."""
        ...


def set_up_swap(
    runner: SwappingRunner, config: EngineConfig, max_len: int, blocks: int, device: str, memory: torch.Tensor | None
) -> tuple[SwapPolicy | None, int]:
    """Cost model and number of blocks of the CPU tier, whose memory the runner takes; (None, 0) where there is none.

    max_len: most tokens of a sequence. blocks: what cpu_blocks gives. device: "cuda" or "cpu". memory: for so many
    blocks, if there is some. Only before the pool holds anything.
    """
    if blocks == 0:
        return None, 0
    space = runner.open_swap(blocks, memory)
    tokens = timed_tokens(device, config, max_len)
    return swap_policy(space, config.cache, runner, tokens, overlaps=device == "cuda"), blocks


def timed_tokens(device: str, config: EngineConfig, max_len: int) -> int:
    """Tokens of the prompt that is timed."""
    return max(1, min(PREFILL_TOKENS[device], config.scheduler.max_num_batched_tokens, max_len - 1))


def cpu_blocks(cache: CacheConfig, block_bytes: int, available: int) -> int:
    """Blocks of CPU memory for `swap_space`; block_bytes: of a block over all layers, available: free bytes.

    0 where swapping is off. A swap_space that the memory does not have is lowered, with a warning unless it is the
    default.
    """
    if cache.swap_space == 0 or cache.swap_threshold == math.inf:
        return 0
    asked, most = int(cache.swap_space * GIB), int(available * MEMORY_SHARE)
    if asked > most and cache.swap_space != CacheConfig.swap_space:
        warnings.warn(
            f"swap_space={cache.swap_space:g} GiB is lowered to {most / GIB:.2f}: half of the {available / GIB:.2f} "
            "GiB of free CPU memory",
            stacklevel=2,
        )
    blocks = min(asked, most) // block_bytes
    if blocks == 0:
        warnings.warn(
            f"swap_space={cache.swap_space:g} GiB holds no block of {block_bytes} bytes, so preempted sequences are "
            "computed anew; raise swap_space or lower block_size",
            stacklevel=2,
        )
    return blocks


def swap_policy(
    space: SwapSpace, cache: CacheConfig, runner: StepRunner, prefill_tokens: int, *, overlaps: bool
) -> SwapPolicy:
    """The cost model, from measured rates. Only before the pool holds anything.

    prefill_tokens: tokens of the prompt that is timed; the pool must hold them. overlaps: copies run beside a step.
    """
    rates = space.measure()
    # 0 copies always, whatever computing costs.
    prefill = prefill_rate(runner, prefill_tokens, cache.block_size) if cache.swap_threshold else 1.0
    return SwapPolicy(
        block_bytes=space.block_bytes,
        block_size=cache.block_size,
        out_rate=rates.out,
        in_rate=rates.in_,
        prefill_rate=prefill,
        threshold=cache.swap_threshold,
        late_seconds=LATE_SECONDS if overlaps else math.inf,
    )


def prefill_rate(runner: StepRunner, tokens: int, block_size: int, repeats: int = 1) -> float:
    """Prompt tokens a second in a step of one prompt of `tokens`, the best of `repeats`; the blocks from 0 on are used.

    It samples a token, so that the step is over when its result is there.
    """
    times = []
    for _ in range(repeats + 1):  # the first one compiles
        items = prompts(tokens, tokens, block_size, GREEDY)
        start = time.perf_counter()
        runner.run(items, [])
        times.append(time.perf_counter() - start)
    return tokens / max(min(times[1:]), 1e-9)

"""The steps whose kernels are compiled ahead: those of an engine's start, of a first request, and the usual rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from qengine.config import EngineConfig
from qengine.engine.cuda_graphs import PREFILLS, TOKENS, batch_sizes
from qengine.engine.device_loading import cache_kind, cache_layout, most_rows, runner_options
from qengine.engine.dry_run import DryRunner
from qengine.engine.graph_limits import tile_rows
from qengine.engine.precompile import Precompiler, count_workers
from qengine.engine.startup_steps import CUT, GREEDY, PLAIN, WIDE, largest_steps, prompts, singles
from qengine.engine.step import StepItem
from qengine.engine.swap_setup import timed_tokens
from qengine.kernels.paged_attn.cache import KVPool
from qengine.models import Decoder

PROMPT_TOKENS = 128
"""Of the first request that is expected."""


def precompiler(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, max_model_len: int, vocab_size: int
) -> Precompiler | None:
    """What compiles a model's kernels ahead on a GPU; None where `compile_workers` asks for none."""
    workers = count_workers(config.device.compile_workers)
    if device.type != "cuda" or workers == 0:
        return None
    size, tokens, rows = config.cache.block_size, config.scheduler.max_num_batched_tokens, most_rows(config)
    longest = max(1, min(tokens, max_model_len - 1))

    def first() -> list[list[StepItem]]:
        steps = largest_steps(tokens, rows, max_model_len, size, TOKENS[-1])
        if config.cache.swap_space:
            steps.append(prompts(timed_tokens("cuda", config, max_model_len), longest, size, GREEDY))
        return [*steps, prompts(min(PROMPT_TOKENS, longest), longest, size, GREEDY), singles(1, GREEDY)]

    def later() -> list[list[StepItem]]:
        steps = [singles(1, params) for params in (WIDE, PLAIN, CUT)]
        steps += [prompts(min(count, longest), longest, size, WIDE) for count in TOKENS if count <= tokens]
        steps += [singles(count, GREEDY) for count in batch_sizes(rows, tile_rows(device))]
        many = max(2, tokens // (2 * PREFILLS[0]))  # short prompts, more than the usual graphs are for
        return [*steps, prompts(min(tokens, TOKENS[-1]), min(many, longest), size, WIDE)]

    def dry(make: Callable[[], list[list[StepItem]]], model: Decoder) -> Iterator[Callable[[], object]]:
        layout = cache_layout(config, model.spec, cache_kind(config, dtype, device))
        blocks = max(-(-tokens // size), rows)
        pool = KVPool.allocate(layout, model.spec.num_layers, blocks, device)
        stream = torch.cuda.current_stream(device)
        options = runner_options(config, model.spec, max_model_len)
        runner = DryRunner(model, pool, vocab_size, stream=stream, **options)
        for items in make():
            yield partial(runner.launch, items, [])

    return Precompiler(workers, device, partial(dry, first), partial(dry, later))

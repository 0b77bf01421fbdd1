"""Steps without a request behind them: those that an engine computes when it starts, and those it is likely to need."""

from __future__ import annotations

from dataclasses import replace

from qengine.engine.sampler import SampleRow
from qengine.engine.step import StepItem
from qengine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CUT = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=1)
"""Draws with every cut there is."""
WIDE = SamplingParams(temperature=0.9, top_p=0.9, seed=1)
PLAIN = SamplingParams(temperature=0.9, seed=1)


def prompts(tokens: int, longest: int, block_size: int, params: SamplingParams | None = None) -> list[StepItem]:
    """A step of prompts of at most `longest` tokens that fill `tokens`. params: the last one samples with these."""
    items: list[StepItem] = []
    block = 0
    while tokens > 0:
        count = min(tokens, longest)
        ids, need = [0] * count, -(-count // block_size)
        rows = [] if params is None or tokens > count else [SampleRow(params, ids, 1, 0)]
        items.append(StepItem(-1 - len(items), ids, 0, count, list(range(block, block + need)), rows))
        block, tokens = block + need, tokens - count
    return items


def singles(rows: int, params: SamplingParams = CUT) -> list[StepItem]:
    """A step of sequences with one token each, which all sample."""
    items = []
    for row in range(rows):
        ids = [0]
        items.append(StepItem(-1 - row, ids, 0, 1, [row], [SampleRow(params, ids, 1, row)]))
    return items


def mixed(tokens: int, rows: int, longest: int, block_size: int) -> list[StepItem]:
    """A step of `tokens`: sequences with one token each, as many of `rows` as can be, beside prompts; rows sample."""
    alone = singles(min(rows - 1, tokens - 2)) if rows > 1 and tokens > 2 else []
    rest = tokens - len(alone)
    prompt = prompts(rest, min(longest, rest), block_size, GREEDY)
    return [*alone, *(replace(item, seq_id=item.seq_id - rows) for item in prompt)]


def largest_steps(tokens: int, rows: int, longest: int, block_size: int, most_captured: int) -> list[list[StepItem]]:
    """The steps that take most memory, where each is launched before the one ahead of it is waited for.

    `tokens` with the most sequences that sample, twice: the logits of one are held beside the activations of the next.
    Then the same of as many tokens as a graph may hold, and single tokens alone.
    """
    captured = [] if tokens <= most_captured else [mixed(most_captured, rows, longest, block_size)]
    return [*(mixed(tokens, rows, longest, block_size) for _ in range(2)), *captured, singles(rows)]

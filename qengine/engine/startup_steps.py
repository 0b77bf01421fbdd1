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


def largest_steps(tokens: int, rows: int, longest: int, block_size: int, most_captured: int) -> list[list[StepItem]]:
    """The steps that take most memory: `tokens` of prompts; as many as a graph may hold, as a prompt beside sequences
    with one token each, which all sample; and these alone."""
    most = min(tokens, most_captured)
    alone = singles(min(rows - 1, most - 2)) if rows > 1 and most > 2 else []
    rest = most - len(alone)
    prompt = prompts(rest, min(longest, rest), block_size, GREEDY)
    mixed = [*alone, *(replace(item, seq_id=item.seq_id - rows) for item in prompt)]
    large = [] if tokens == most else [prompts(tokens, min(longest, tokens), block_size)]
    return [*large, mixed, singles(rows)]

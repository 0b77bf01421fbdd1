"""What steps are worth a CUDA graph: how many tokens with prompt chunks, how many rows of a decode step."""

from __future__ import annotations

import math
from bisect import bisect_right

import torch

from qengine.engine.cuda_graphs import TOKENS
from qengine.kernels.fused.card import capability
from qengine.models.spec import ModelSpec

LAYER_SECONDS = 1.5e-3
"""What launching a layer's kernels one by one takes the host: 1.2 to 2.6 ms were measured beside an H200."""
CLOCK = 1.6e9
"""Of multiprocessors under load, within a fifth on the cards below."""
REACHED = 0.7
"""The share of the peak that the products reach at many tokens."""
MULTIPLY_ADDS = {75: 512, 80: 1024, 86: 512, 89: 512, 90: 2048}
"""fp16 multiply-adds of a multiprocessor in a cycle; later cards count as the last."""


def graph_tokens(spec: ModelSpec, device: torch.device) -> int:
    """Most tokens of a mixed step that a graph makes faster on the device. See `worth_capturing`."""
    if device.type != "cuda":
        return TOKENS[-1]
    card = torch.cuda.get_device_properties(device)
    known = max((sm for sm in MULTIPLY_ADDS if sm <= 10 * card.major + card.minor), default=75)
    rate = REACHED * MULTIPLY_ADDS[known] * CLOCK * card.multi_processor_count
    return worth_capturing(sum(math.prod(shape) for shape in spec.linear_shapes().values()), rate)


def tile_rows(device: torch.device) -> int:
    """Rows of a full tile of the packed products of decode steps, as the launch tables have them."""
    return 128 if device.type == "cuda" and capability(device) >= 90 else 64


def worth_capturing(weights: int, rate: float) -> int:
    """The most of TOKENS, at least the first, whose kernels take the card no longer than their launches the host.

    Larger steps hide their launches, and an eager one has no padding. weights: of a layer. rate: multiply-adds a second
    of the card.
    """
    most = LAYER_SECONDS * rate / weights
    return TOKENS[max(0, bisect_right(TOKENS, most) - 1)]

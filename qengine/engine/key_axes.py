"""Which pair of elements holds most of each KV head's key energy: the axes of a rotating 4-bit cache."""

from __future__ import annotations

import torch

from qengine.kernels.paged_attn.rotation import choose_axes
from qengine.layers.attention import DenseContext
from qengine.models import Decoder

TOKENS, COMMON, SINKS = 256, 8192, 8
"""Tokens looked at, among the first COMMON ids (the most frequent ones of most vocabularies), less the first SINKS."""


class _KeyEnergy(DenseContext):
    """Attends densely and keeps the mean square of every layer's keys, [Hkv, D] each, after their rotary embedding."""

    def __init__(self, length: int) -> None:
        super().__init__(1, length)
        self.energy: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See DenseContext."""
        self.energy[layer_index] = k[min(SINKS, k.shape[0] - 1) :].float().square().mean(0)
        return super().attend(layer_index, q, k, v, scale=scale, softcap=softcap, sliding_window=sliding_window)


@torch.inference_mode()
def key_axes(decoder: Decoder) -> torch.Tensor:
    """int32 [L, Hkv] on the decoder's device, for `KVPool.axes`.

    Measured on one pass over fixed pseudo-random tokens. The pair is a property of the model, not of the text: such
    tokens find the same one as prose for nine of ten heads of SmolLM2, and a wrong one costs accuracy, nothing else.
    """
    spec = decoder.spec
    length = min(TOKENS, spec.max_position)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(COMMON, spec.vocab_size), (length,), generator=generator).to(decoder.device)
    context = _KeyEnergy(length)
    decoder.forward(ids, torch.arange(length, device=decoder.device), context)
    return choose_axes(torch.stack([context.energy[index] for index in range(spec.num_layers)]))

"""Activation functions under the names that Hugging Face configs use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.errors import UnsupportedError
from qengine.kernels.fused.ref import ACTIVATIONS, act_and_mul


@dataclass(frozen=True)
class GatedActivation:
    """act(gate) * up."""

    name: str

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Gate and up [T, I] of one dtype, rows dense -> [T, I]."""
        if gate.is_cuda:
            from qengine.kernels.fused import ops

            return ops.act_and_mul((gate, up), self.name)
        return act_and_mul(gate, up, self.name)

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        """Gate and up side by side [T, 2 I] -> [T, I]."""
        size = both.shape[1] // 2
        return self(both[:, :size], both[:, size:])


def gated_activation(name: str) -> GatedActivation:
    """The function called `name`. Raises UnsupportedError with the known names."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return GatedActivation(name)

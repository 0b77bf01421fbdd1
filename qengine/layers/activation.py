"""Activation functions under the names that Hugging Face configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from qengine.errors import UnsupportedError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def activation(name: str) -> Activation:
    """The function called `name`. Raises UnsupportedError with the known names."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]

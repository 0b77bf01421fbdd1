"""Which products of float32 matrices may round their factors on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Factors are rounded to TF32's 11 significant bits where the GPU has it, sums stay float32: eight times as fast.

    For layers run on calibration text, which float16 inference rounds as much, and for moments: a moment of rounded
    rows is still a moment.
    """
    with _precision(device, "high"):
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No factor is rounded, also inside `tensor_cores`.

    For factorizations, solves and errors, whose small differences of large numbers the rounding would drown.
    """
    with _precision(device, "highest"):
        yield


@contextmanager
def _precision(device: torch.device, name: str) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

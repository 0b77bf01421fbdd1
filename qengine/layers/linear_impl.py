"""What an implementation of a linear layer is, and the facts that the choice among them goes by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from qengine.quant import LinearWeight, PlainWeight, QuantizedWeight, QuantSpec


@dataclass(frozen=True)
class LinearCase:
    """One linear layer and where it is to run.

    shape: (N, K). quant: None for a plain weight. weight_dtype: of the plain weight or of the scales. dtype: of inputs
    and outputs. sorted_groups: after sorting columns by group, every group has group_size columns. fp16_exact: every
    (dequantized) value is a float16 number; None where only headers are known.
    """

    shape: tuple[int, int]
    quant: QuantSpec | None
    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device
    sorted_groups: bool = True
    fp16_exact: bool | None = None

    def __str__(self) -> str:
        kind = "plain" if self.quant is None else f"{self.quant.bits}-bit, group {self.quant.group_size}"
        dtypes = f"{_name(self.weight_dtype)} weights, {_name(self.dtype)} inputs"
        return f"{self.shape[0]} x {self.shape[1]} ({kind}, {dtypes}, {self.device.type})"

    @classmethod
    def of(cls, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> LinearCase:
        """The case of a weight in memory."""
        if isinstance(weight, PlainWeight):
            shape = (weight.weight.shape[0], weight.weight.shape[1])
            exact = is_fp16_exact(weight.weight) if needs_fp16_check(dtype, device) else None
            return cls(shape, None, weight.weight.dtype, dtype, device, fp16_exact=exact)
        exact = None
        if needs_fp16_check(dtype, device):
            # Whatever has float16 scales is dequantized to float16: only an overflow would not be a number there.
            exact = weight.scales.dtype == torch.float16 or is_fp16_exact(weight.dequantize())
        return cls(weight.shape, weight.spec, weight.scales.dtype, dtype, device, groups_are_full(weight), exact)


class LinearImpl(ABC):
    """Computes x W^T + bias. Subclasses set shape and bias (or None), and hold the weight in a form of their own.

    gated: the result is act(gate) * up [T, N / 2] of the columns gate and up of that.
    """

    name: ClassVar[str]
    gated: ClassVar[bool] = False
    shape: tuple[int, int]
    bias: torch.Tensor | None

    @staticmethod
    @abstractmethod
    def why_not(case: LinearCase) -> str | None:
        """None if this implementation serves the case, else the reason in words."""

    @abstractmethod
    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None: ...

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, K] -> y [T, N], both in the compute dtype."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that weight and bias take."""


def needs_fp16_check(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it matters if the weights are float16 numbers."""
    return device.type == "cpu" and dtype == torch.float32


def is_fp16_exact(values: torch.Tensor) -> bool:
    """Whether every value is finite in float16 and unchanged by it."""
    if values.dtype == torch.float16:
        return bool(torch.isfinite(values).all())
    half = values.half()
    return bool(torch.isfinite(half).all()) and torch.equal(half.to(values.dtype), values)


def groups_are_full(weight: QuantizedWeight) -> bool:
    """Whether each group has exactly group_size columns, in any order."""
    groups, size = weight.scales.shape[1], weight.group_size
    if groups * size != weight.shape[1]:
        return False
    return weight.g_idx is None or bool((torch.bincount(weight.g_idx.long(), minlength=groups) == size).all())


def weight_shape(weight: LinearWeight) -> tuple[int, int]:
    """(N, K)."""
    return (weight.weight.shape[0], weight.weight.shape[1]) if isinstance(weight, PlainWeight) else weight.shape


def dense(weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] in `dtype`, dequantized if need be."""
    return weight.weight.to(dtype) if isinstance(weight, PlainWeight) else weight.dequantize(dtype)


def size_of(*tensors: torch.Tensor | None) -> int:
    """Bytes of the tensors that are there."""
    return sum(t.nbytes for t in tensors if t is not None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

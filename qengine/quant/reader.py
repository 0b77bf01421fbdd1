"""What a quantization format has to provide, and the checks that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from qengine.checkpoint import TensorInfo, TensorStore
from qengine.errors import CheckpointError
from qengine.quant.config import QuantConfig
from qengine.quant.weights import QuantizedWeight, QuantSpec

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FormatReader(ABC):
    """Reads the quantized linear modules of one checkpoint. A module is quantized if and only if its tensors say so."""

    suffixes: tuple[str, ...] = ()

    def __init__(self, tensors: TensorStore, config: QuantConfig) -> None:
        self.tensors = tensors
        self.config = config

    @property
    def method(self) -> str:
        """awq, gptq, compressed-tensors or auto-round, as the checkpoint names it."""
        return self.config.method

    @abstractmethod
    def modules(self) -> list[str]:
        """Dotted names of the quantized modules, in the order of the checkpoint."""

    @abstractmethod
    def spec(self, name: str) -> QuantSpec:
        """How module `name` is quantized, from headers and small tensors. Errors name the module."""

    @abstractmethod
    def check(self, name: str) -> tuple[int, int]:
        """(N, K) of module `name`, after all its tensors' shapes and dtypes were found to fit together."""

    @abstractmethod
    def load(self, name: str) -> QuantizedWeight:
        """Module `name`, unpacked on the CPU."""

    def check_model(self) -> None:
        """What concerns the whole checkpoint: here, scales whose module lacks its weight."""
        whole = set(self.modules())
        for name in self.tensors:
            module, _, last = name.rpartition(".")
            if last == "qzeros" and module not in whole:
                raise CheckpointError(f"{module}: qweight is missing from the checkpoint; download or convert it again")

    def parts(self, name: str) -> list[str]:
        """Names of the tensors that module `name` is made of, its bias apart."""
        return [f"{name}.{suffix}" for suffix in self.suffixes if f"{name}.{suffix}" in self.tensors]

    def part(self, name: str, suffix: str, dtypes: Iterable[torch.dtype]) -> TensorInfo:
        """Header entry of one tensor of the module; CheckpointError if it is missing or of another dtype."""
        info = self.tensors.get(f"{name}.{suffix}")
        if info is None:
            raise CheckpointError(
                f"{name}: {suffix} is missing from the checkpoint; download or convert the model again"
            )
        allowed = tuple(dtypes)
        if info.dtype not in allowed:
            names = ", ".join(short(dtype) for dtype in allowed)
            raise CheckpointError(f"{name}: {suffix} in {info.file.name} is {short(info.dtype)}, expected {names}")
        return info

    def load_scales(self, name: str, suffix: str = "scales") -> torch.Tensor:
        """The scales, every one finite."""
        scales = self.tensors.load(f"{name}.{suffix}")
        check_finite(name, suffix, scales)
        return scales

    def load_bias(self, name: str, out_features: int) -> torch.Tensor | None:
        """The bias [N], or None."""
        if f"{name}.bias" not in self.tensors:
            return None
        self.check_bias(name, out_features)
        return self.tensors.load(f"{name}.bias")

    def check_bias(self, name: str, out_features: int) -> None:
        """A bias, where there is one, must be floating point and [N]."""
        if f"{name}.bias" in self.tensors:
            info = self.part(name, "bias", SCALE_DTYPES)
            expect_shape(name, "bias", info, (out_features,))


def short(dtype: torch.dtype) -> str:
    """float16 instead of torch.float16."""
    return str(dtype).removeprefix("torch.")


def expect_shape(name: str, suffix: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    """CheckpointError unless the tensor has this shape."""
    if info.shape != shape:
        raise CheckpointError(
            f"{name}: {suffix} in {info.file.name} has shape {list(info.shape)}, expected {list(shape)}; "
            "the file or its quantization config is wrong: convert the model again"
        )


def check_finite(name: str, suffix: str, values: torch.Tensor) -> None:
    """CheckpointError if any value is inf or NaN."""
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise CheckpointError(
            f"{name}: {bad} of {values.numel()} values of {suffix} are inf or NaN; the checkpoint is damaged or its "
            "calibration failed: convert the model again"
        )


def contiguous_groups(in_features: int, group_size: int) -> torch.Tensor:
    """int32 [K]: k // group_size."""
    return (torch.arange(in_features, dtype=torch.int64) // group_size).int()


def simplify_group_index(
    name: str, g_idx: torch.Tensor, in_features: int, groups: int, group_size: int
) -> tuple[torch.Tensor | None, int]:
    """(g_idx or None where it is just k // size, the group size that holds).

    g_idx: int32 [K] as stored; group_size: what the config says, resolved to K for -1. CheckpointError for a group
    that does not exist.
    """
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{name}: g_idx names group {low if low < 0 else high}, but there are {groups} groups (0 to {groups - 1}); "
            "the checkpoint is damaged: convert the model again"
        )
    first = int((g_idx == 0).sum())
    for size in (group_size, first):
        if size > 0 and torch.equal(g_idx, contiguous_groups(in_features, size)):
            return None, size
    return g_idx, group_size

"""Tensors of a device that have a shape, a dtype and an address, but no memory: for launches that are only looked at.

torch's FakeTensorMode does as much and more, but imports its compiler for it, which takes longer than all we do here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

BASE = 1 << 40
"""Where storages without memory seem to begin: aligned as the allocator's are."""


class ShapeOnly(torch.Tensor):
    """Stands for a tensor on `device`; `like` is one of torch's meta tensors, which has its sizes and strides."""

    like: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device) -> ShapeOnly:
        """Wrap a meta tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype,
            device=device,
        )  # fmt: skip
        made.like = like
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An operation outside `shapes_only` is a mistake: there is nothing to compute on."""
        raise RuntimeError(f"{func} on a tensor that has no memory")

    def data_ptr(self) -> int:
        """An address with the alignment that the tensor would have."""
        return BASE + int(self.storage_offset()) * self.element_size()


class shapes_only(TorchDispatchMode):
    """Within, what this thread computes on `device` gives ShapeOnly tensors, and the device does nothing.

    Tensors of the device from outside are used for their shapes. Operations on the CPU alone are computed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        # tensors of inference mode cannot be views of those from before it
        with torch.inference_mode(False), torch.no_grad():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        target = kwargs.get("device")
        asked = target is not None and torch.device(target).type == self._device.type
        if not asked and not any(x.device.type == self._device.type for x in tensors):
            return func(*args, **kwargs)
        if target is not None and not asked:
            raise RuntimeError(f"{func} reads a tensor that has no memory")
        known: dict[int, torch.Tensor] = {}

        def enter(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            like = x.like if isinstance(x, ShapeOnly) else _meta(x)
            known[id(like)] = x
            return like

        if target is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*tree_map(enter, args), **tree_map(enter, kwargs))

        def leave(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return known[id(x)] if id(x) in known else ShapeOnly(x, self._device)  # itself, where it was changed

        return tree_map(leave, result)


def _meta(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the sizes and strides of x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

"""Keys of kernels that are the same in every process.

Triton 3.6 takes the constants of a function that a kernel calls into the kernel's key only if that function was hashed
before, as by another kernel that calls it: the key then depends on the order in which a process launches its kernels,
and one process does not find what another has compiled. So functions are hashed here before those that call them.
"""

from __future__ import annotations

import inspect
from typing import Any

from triton.runtime.jit import DependenciesFinder


class _Callees(DependenciesFinder):
    """Collects the functions that a kernel calls."""

    def __init__(self, kernel: Any) -> None:
        nonlocals = inspect.getclosurevars(kernel.fn).nonlocals
        super().__init__(name=kernel._fn_name, globals=kernel.__globals__, nonlocals=nonlocals, src=kernel.src)
        self.found: list[Any] = []
        self.visit(kernel.parse())

    def _update_hash(self, func: Any) -> None:
        self.found.append(func)


def settle_key(kernel: Any) -> None:
    """Give a JITFunction its key, after all that it calls. Those that have one keep it."""
    _settle(kernel, set())


def _settle(kernel: Any, under_way: set[int]) -> None:
    if kernel.hash is not None or id(kernel) in under_way:
        return
    under_way.add(id(kernel))
    for callee in _Callees(kernel).found:
        _settle(callee, under_way)
    kernel.cache_key  # noqa: B018 (computed when it is read, and kept)

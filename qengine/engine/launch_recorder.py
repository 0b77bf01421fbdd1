"""What launches would compile: Triton's own first half of a launch, on tensors that have no memory.

Within `recorded_launches` nothing that this thread launches reaches the device or the compiler. Each launch ends where
Triton would compile, and leaves the specialization it would compile: so what is compiled ahead follows from the code
that launches, whatever it chooses.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from qengine.engine.kernel_keys import settle_key
from qengine.engine.shape_only import shapes_only
from qengine.kernels.operator import direct_calls
from qengine.kernels.w4a16.ops import other_workspaces


class _NotCachedError(Exception):
    pass


@dataclass(frozen=True)
class KernelSpec:
    """One specialization of a kernel, as Triton's compiler takes it; it can be pickled.

    module, name: of the kernel. source: Triton's class for its language. target: triton's GPUTarget.
    """

    module: str
    name: str
    source: type
    signature: dict[str, Any]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    def compile(self) -> None:
        """Compile it, or find it, in Triton's cache folder. No device is asked for. Raises as Triton does."""
        triton.compile(self._source(), target=self.target, options=self.options)

    def is_cached(self) -> bool:
        """Whether Triton's cache folder has it: so Triton itself finds, stopped where it would begin to compile."""

        def begin(*_: Any, **__: Any) -> None:
            raise _NotCachedError

        source = self._source()
        source.make_ir = begin
        try:
            triton.compile(source, target=self.target, options=self.options)
        except _NotCachedError:
            return False
        return True

    def _source(self) -> Any:
        kernel = getattr(importlib.import_module(self.module), self.name)
        settle_key(kernel)
        return self.source(kernel, self.signature, self.constexprs, self.attrs)


Key = tuple[str, str]
"""A kernel's full name, and Triton's key of one specialization in the process."""


def kernel_key(kernel: Any, key: str) -> Key:
    """The Key of a JITFunction's specialization."""
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", key


@contextmanager
def compiling(before: Callable[[Key], None]) -> Iterator[None]:
    """Within, `before` is called with what any thread is about to compile or to look for in the cache folder."""
    stock = JITFunction._do_compile

    def compile_kernel(self: Any, key: str, *rest: Any, **named: Any) -> Any:
        before(kernel_key(self, key))
        return stock(self, key, *rest, **named)

    JITFunction._do_compile = compile_kernel
    try:
        yield
    finally:
        if JITFunction._do_compile is compile_kernel:
            JITFunction._do_compile = stock


@contextmanager
def recorded_launches(device: torch.device) -> Iterator[dict[Key, KernelSpec]]:
    """Record this thread's launches on `device`, in order, each specialization once; other threads launch as ever.

    Kernels that the process has compiled are left out. Tensors that are made within have no memory; those from outside
    are used for their shapes.
    """
    found: dict[Key, KernelSpec] = {}
    owner = threading.get_ident()
    run, compile_kernel = JITFunction.run, JITFunction._do_compile

    def dry_run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == owner, **named)

    def record(self: Any, key: str, signature: Any, index: int, constexprs: Any, options: Any, attrs: Any,
               warmup: bool) -> Any:  # fmt: skip
        if threading.get_ident() != owner:
            return compile_kernel(self, key, signature, index, constexprs, options, attrs, warmup)
        settle_key(self)
        target = self.device_caches[index][2]
        found[kernel_key(self, key)] = KernelSpec(
            self.fn.__module__, self.fn.__qualname__, self.ASTSource, signature, constexprs, attrs,
            dict(options.__dict__), target,
        )  # fmt: skip
        return None

    JITFunction.run, JITFunction._do_compile = dry_run, record
    try:
        with shapes_only(device), direct_calls(), other_workspaces():
            yield found
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_kernel

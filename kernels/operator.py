"""Torch operators whose functions are called directly where nobody traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_direct: ContextVar[bool] = ContextVar("qengine_operators_direct", default=False)


@contextmanager
def direct_calls() -> Iterator[None]:
    """Within, operators call their functions under a dispatch mode too: a dry run on fake tensors reaches launches."""
    token = _direct.set(True)
    try:
        yield
    finally:
        _direct.reset(token)


def operator(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], Any]:
    """As torch.library.custom_op, but a plain call costs no more than the function.

    torch's dispatcher adds some 30 microseconds a call, which a step of a few hundred kernels that is not replayed from
    a CUDA graph would feel. While torch.compile or export traces, or a dispatch mode such as FakeTensorMode is on,
    calls go through the registered operator, `torch.ops.qengine...`.
    """

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, mutates_args=tuple(mutates_args))(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            traced = torch.compiler.is_compiling() or (torch._C._len_torch_dispatch_stack() > 0 and not _direct.get())
            return op(*args, **kwargs) if traced else function(*args, **kwargs)

        call.register_fake = op.register_fake  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__
        return call

    return register

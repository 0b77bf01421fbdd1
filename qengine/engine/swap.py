"""Carries out copies of cache blocks between a device and CPU memory: `SwapSpace`, which a runner owns.

When each copy must be finished is stated by `SwapOrders`; SwapSpace puts the copies on a stream of their own and lets
the streams wait for each other just as far as that asks. What a stream and a copy are is a `SwapDevice`'s business:
plain tensors here, a GPU in cuda_swap.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qengine.engine.swap_orders import Copy, SwapOrders

PROBE_BYTES = 32 << 20
"""Bytes copied at once when the rates are measured."""


class SwapDevice(Protocol):
    """A pool of device blocks, as many CPU blocks as `num_cpu_blocks`, and two streams: compute and swap.

    What is enqueued on one stream happens in order; between the streams nothing is ordered but by the waits.
    """

    block_bytes: int
    num_blocks: int
    num_cpu_blocks: int

    def copy_out(self, pairs: Sequence[Copy]) -> None:
        """Enqueue on the swap stream copies (device block, CPU block), in any order among each other."""
        ...

    def copy_in(self, pairs: Sequence[Copy]) -> None:
        """Enqueue on the swap stream copies (CPU block, device block), in any order among each other."""
        ...

    def swap_waits(self) -> None:
        """What the swap stream gets from now on waits for what the compute stream has got until now."""
        ...

    def mark(self) -> Any:
        """An event: all that the swap stream has got until now is done."""
        ...

    def compute_waits(self, event: Any) -> None:
        """What the compute stream gets from now on waits for the event."""
        ...

    def synchronize(self) -> None:
        """Wait until both streams are done."""
        ...

    def close(self) -> None:
        """Give the CPU memory back; nothing may be under way."""
        ...


@dataclass(frozen=True)
class SwapRates:
    """Measured bytes a second: from the device to CPU memory, and back."""

    out: float
    in_: float


class SwapSpace:
    """The CPU tier's memory, and the copies to and from it.

    The runner calls `begin_step` once a step, with the step's orders (none too), before it enqueues anything of the
    step on the compute stream. Nothing waits on the CPU. The order that results, with C(n) all of step n on the
    compute stream, and on the swap stream out(n), in(n), late_out(n), late_in(n) one after the other:

    - C(n-1) before out(n): a block is copied out as the last step left it, and nothing is copied into a block that
      the last step still reads.
    - out(n), in(n) before C(n): a block that is freed by its copy out is not written before that copy is finished, and
      a block is not read before its copy in is finished.
    - late_out(n), late_in(n) before C(n+1), for the same reasons; beside C(n), which leaves those blocks alone.
    - all of step n before all of step n+1 on the swap stream: a CPU block is not filled again before its copy in is
      finished, nor read before its copy out is.
    """

    def __init__(self, device: SwapDevice) -> None:
        self._device = device
        self._late: Any = None

    @property
    def num_blocks(self) -> int:
        """Blocks of CPU memory."""
        return self._device.num_cpu_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self._device.block_bytes

    def begin_step(self, orders: SwapOrders) -> None:
        """Enqueue the copies of a step and let its work wait for those that it needs."""
        device, late, self._late = self._device, self._late, None
        if late is not None:
            device.compute_waits(late)
        if not orders:
            return
        device.swap_waits()
        device.copy_out(orders.out)
        device.copy_in(orders.in_)
        if orders.out or orders.in_:
            device.compute_waits(device.mark())
        device.copy_out(orders.late_out)
        device.copy_in(orders.late_in)
        if orders.late_out or orders.late_in:
            self._late = device.mark()

    def measure(self, repeats: int = 3) -> SwapRates:
        """Time copies both ways, the best of `repeats`. Only before the pool holds anything: blocks are overwritten."""
        device = self._device
        count = max(1, min(device.num_blocks, device.num_cpu_blocks, PROBE_BYTES // device.block_bytes))
        pairs = [(block, block) for block in range(count)]
        best = []
        for copy in (device.copy_out, device.copy_in):
            times = []
            for _ in range(repeats + 1):  # the first one touches the memory, and compiles
                device.synchronize()
                start = time.perf_counter()
                copy(pairs)
                device.synchronize()
                times.append(time.perf_counter() - start)
            best.append(count * device.block_bytes / max(min(times[1:]), 1e-9))
        return SwapRates(*best)

    def close(self) -> None:
        """Wait for copies under way and give the CPU memory back."""
        self._device.synchronize()
        self._device.close()


class TensorSwapDevice:
    """CPU memory beside a cache of plain CPU tensors [num_blocks, ...]: each copy is done when its call returns.

    tensors: all that a block consists of, as keys and values of each layer. The memory is taken from the system as it
    is first used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_cpu_blocks: int) -> None:
        assert all(t.device.type == "cpu" for t in tensors), "a cache on a GPU needs a CudaSwapDevice"
        self.num_blocks = tensors[0].shape[0]
        self.num_cpu_blocks = num_cpu_blocks
        self.block_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
        self._tensors = list(tensors)
        self._host = [torch.empty((num_cpu_blocks, *t.shape[1:]), dtype=t.dtype) for t in tensors]

    def copy_out(self, pairs: Sequence[Copy]) -> None:
        """See SwapDevice."""
        self._copy(self._tensors, self._host, pairs)

    def copy_in(self, pairs: Sequence[Copy]) -> None:
        """See SwapDevice."""
        self._copy(self._host, self._tensors, pairs)

    def swap_waits(self) -> None:
        """Nothing to wait for."""

    def mark(self) -> Any:
        """Nothing to wait for."""
        return None

    def compute_waits(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """See SwapDevice."""
        self._host = []

    @staticmethod
    def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: Sequence[Copy]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(dim=1)
        for read, written in zip(sources, targets, strict=True):
            written[target] = read[source]

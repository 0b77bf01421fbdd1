"""Pinned CPU memory beside a GPU's paged pool, filled and read on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qengine.engine.swap_orders import Copy
from qengine.errors import CapacityError
from qengine.kernels.paged_attn.blocks import run_move
from qengine.kernels.paged_attn.cache import KVPool

GIB = 1024**3
STAGING_BYTES = 32 << 20
"""About so many bytes of the device are a buffer between the pool and the CPU memory."""


class PinnedBlocks:
    """uint8 [num_blocks, L, block_bytes] in CPU memory that a GPU's copy engines read and write.

    memory: uint8, of that many bytes; pinning is faster where all pages of it are there. Without it, exactly the size
    asked for is allocated (torch's own pinned allocations are rounded up to powers of two), until `close`. Raises
    CapacityError if the system does not give so much.
    """

    def __init__(self, num_blocks: int, num_layers: int, block_bytes: int, memory: torch.Tensor | None = None) -> None:
        nbytes = num_blocks * num_layers * block_bytes
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory
        except RuntimeError as error:
            raise CapacityError(f"{_asked(nbytes)} cannot be allocated: {error}; lower swap_space") from error
        self.tensor = memory.view(num_blocks, num_layers, block_bytes)
        code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
        self._registered = int(code) == 0
        if not self._registered:
            raise CapacityError(f"{_asked(nbytes)} cannot be pinned (CUDA error {int(code)}); lower swap_space")

    def close(self) -> None:
        """Unpin and free the memory. Nothing on a GPU may use it any more. A second call does nothing."""
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "_registered", False):
            torch.cuda.synchronize()
            self.close()


class CudaSwapDevice:
    """See SwapDevice. compute: the stream on which the runner enqueues its steps. memory: for PinnedBlocks.

    The pieces of some blocks are gathered into one buffer on the device, or scattered from it, and the buffer crosses
    PCIe by a copy engine, beside which kernels of the compute stream run undisturbed (kernels that reach over PCIe
    themselves hold them up for as long as they run). The buffer takes STAGING_BYTES of the device; all its uses
    are on the swap stream, one after the other. The device is waited for in `synchronize` only.
    """

    def __init__(
        self, pool: KVPool, num_cpu_blocks: int, compute: torch.cuda.Stream, memory: torch.Tensor | None = None
    ) -> None:
        layers, piece = pool.num_layers, pool.layout.block_bytes
        self.num_blocks = pool.num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_bytes = layers * piece
        self._pool = pool
        self._depth = buffered_pieces(layers, piece)
        self._staging = torch.empty((self._depth, piece), dtype=torch.uint8, device=pool.storage.device)
        self._host = PinnedBlocks(num_cpu_blocks, layers, piece, memory)
        self._compute = compute
        # Its kernels are short, and what waits for them is long: they go before others.
        self._swap = torch.cuda.Stream(pool.storage.device, priority=-1)
        self._swap.wait_stream(torch.cuda.current_stream(pool.storage.device))

    def copy_out(self, pairs: Sequence[Copy]) -> None:
        """See SwapDevice."""
        for ids, staged, moves in self._parts([(cpu, block) for block, cpu in pairs]):
            run_move(self._pool, ids, staged, gather=True, first_layer=moves.first_layer)
            for buffer, host in moves.between(staged, self._host.tensor):
                host.copy_(buffer, non_blocking=True)

    def copy_in(self, pairs: Sequence[Copy]) -> None:
        """See SwapDevice."""
        for ids, staged, moves in self._parts(pairs):
            for buffer, host in moves.between(staged, self._host.tensor):
                buffer.copy_(host, non_blocking=True)
            run_move(self._pool, ids, staged, gather=False, first_layer=moves.first_layer)

    def swap_waits(self) -> None:
        """See SwapDevice."""
        self._swap.wait_stream(self._compute)

    def mark(self) -> torch.cuda.Event:
        """See SwapDevice."""
        event = torch.cuda.Event()
        event.record(self._swap)
        return event

    def compute_waits(self, event: torch.cuda.Event) -> None:
        """See SwapDevice."""
        self._compute.wait_event(event)

    def synchronize(self) -> None:
        """See SwapDevice."""
        self._compute.synchronize()
        self._swap.synchronize()

    def close(self) -> None:
        """See SwapDevice."""
        self._host.close()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _parts(self, pairs: Sequence[Copy]) -> Iterator[tuple[torch.Tensor, torch.Tensor, Moves]]:
        """Pairs (CPU block, device block) in parts that the buffer holds, with the swap stream current.

        Yields device blocks int64 [n], the buffer as uint8 [n, layers, block_bytes], and what goes where in CPU memory.
        """
        if not pairs:
            return
        ordered = sorted(pairs)
        with torch.cuda.stream(self._swap):
            for start, moves in cut([cpu for cpu, _ in ordered], self._pool.num_layers, self._depth):
                if moves.first_layer == 0:  # a tensor of its own for each part: the kernel is compiled for aligned ones
                    blocks = [block for _, block in ordered[start : start + len(moves.cpu_blocks)]]
                    host_ids = torch.tensor(blocks, dtype=torch.int64).pin_memory()
                    ids = host_ids.to(self._pool.storage.device, non_blocking=True)
                yield ids, moves.buffer(self._staging), moves


@dataclass(frozen=True)
class Moves:
    """CPU blocks in ascending order, and the layers of them, that a buffer holds one after the other."""

    cpu_blocks: list[int]
    first_layer: int
    num_layers: int

    def buffer(self, staging: torch.Tensor) -> torch.Tensor:
        """The part of the buffer [pieces, block_bytes] that holds them: [n, num_layers, block_bytes]."""
        count = len(self.cpu_blocks)
        return staging[: count * self.num_layers].view(count, self.num_layers, -1)

    def between(self, staged: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Contiguous pieces of `buffer`, each with its place in CPU memory [blocks, L, block_bytes]."""
        layers = slice(self.first_layer, self.first_layer + self.num_layers)
        whole = self.num_layers == host.shape[1]
        for start, end in runs(self.cpu_blocks) if whole else ((i, i + 1) for i in range(len(self.cpu_blocks))):
            first = self.cpu_blocks[start]
            yield staged[start:end], host[first : first + end - start, layers]


def buffered_pieces(num_layers: int, block_bytes: int) -> int:
    """Pieces (one layer's part of a block, of block_bytes) that the buffer holds: whole blocks, or a part of one."""
    count = max(1, STAGING_BYTES // block_bytes)
    return count if count < num_layers else count // num_layers * num_layers


def cut(cpu_blocks: list[int], num_layers: int, pieces: int) -> Iterator[tuple[int, Moves]]:
    """Ascending blocks of `num_layers` layers in parts of at most so many pieces, each with the index of its first."""
    count, depth = max(1, pieces // num_layers), min(num_layers, pieces)
    for start in range(0, len(cpu_blocks), count):
        for first in range(0, num_layers, depth):
            yield start, Moves(cpu_blocks[start : start + count], first, min(depth, num_layers - first))


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of consecutive numbers in an ascending sequence."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield start, i
            start = i


def _asked(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB of CPU memory for swapping"

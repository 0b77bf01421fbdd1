"""CPU memory for swapped blocks, whose pages are made while the model loads."""

from __future__ import annotations

import threading

import torch

PAGE = 4096
PIECE = 64 << 20
"""Bytes that are touched by one call: few enough that torch does not share it out, as loading wants the processors."""


class TouchedMemory:
    """uint8 memory for `num_blocks` blocks of `block_bytes`; a thread writes to every page of it, once.

    The system makes a page when it is first written to: 4 GiB take seconds, which pinning would otherwise spend after
    the model is loaded. Give it to who needs it by `take`, or `close` it.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory: torch.Tensor | None = torch.empty(num_blocks * block_bytes, dtype=torch.uint8)
        self._closed = False
        self._thread = threading.Thread(target=self._touch, args=(self._memory,), daemon=True, name="qengine-touch")
        self._thread.start()

    def take(self) -> torch.Tensor:
        """The memory, [num_blocks * block_bytes], all of it touched. Once only."""
        self._thread.join()
        memory, self._memory = self._memory, None
        assert memory is not None, "the memory was taken or closed before"
        return memory

    def close(self) -> None:
        """Stop, and give the memory back unless it was taken. A second call does nothing."""
        self._closed = True
        self._thread.join()
        self._memory = None

    def _touch(self, memory: torch.Tensor) -> None:
        for start in range(0, memory.numel(), PIECE):
            if self._closed:
                return
            memory[start : start + PIECE : PAGE] = 0

"""Decode steps as CUDA graphs: one for each batch size of a short ladder, captured when first needed."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qengine.engine.device_inputs import DeviceInputs, InputShape

logger = logging.getLogger(__name__)


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that get a graph: dense where padding would cost most, every 16 from 32 on."""
    sizes = [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, *range(48, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < largest] + [largest]


class _Borrowed:
    """Device memory by address, for a tensor that does not keep it: it belongs to the graphs' pool."""

    def __init__(self, tensor: torch.Tensor) -> None:
        kinds = {torch.float16: "<f2", torch.float32: "<f4"}
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": kinds[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of contiguous `tensor` that does not keep its memory from being used again by the graphs' pool."""
    if tensor.dtype == torch.bfloat16:
        return torch.as_tensor(_Borrowed(tensor.view(torch.float16)), device=tensor.device).view(torch.bfloat16)
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs of `forward`, which turns DeviceInputs of a decode step into logits [B, V].

    All read one input buffer and share one memory pool: the logits of a replay are good until the next one. max_rows:
    sequences of the largest step. blocks: longest block table. stream: where everything of the runner happens.
    """

    def __init__(
        self,
        forward: Callable[[DeviceInputs], torch.Tensor],
        *,
        max_rows: int,
        blocks: int,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._forward = forward
        self._sizes = batch_sizes(max_rows)
        self._blocks = blocks
        self._stream = stream
        self._buffer = torch.zeros(self.shape(max_rows).offsets()[-1], dtype=torch.uint8, device=device)
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None
        self._taken: list[int] = []

    @property
    def buffer(self) -> torch.Tensor:
        """Where the inputs of the next replay are put, laid out as `shape` says."""
        return self._buffer

    def shape(self, rows: int) -> InputShape:
        """The layout of the inputs of a step of `rows` sequences, padding included."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        return InputShape(tokens=size, sequences=size, prefills=0, blocks=self._blocks)

    def replay(self, rows: int) -> torch.Tensor:
        """Logits [rows, V] of the inputs in the buffer; enqueued on the stream, nothing is waited for."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        captured = self._captured.get(size) or self._capture(size)
        captured.graph.replay()
        return captured.logits[:rows]

    def graph_bytes(self) -> list[int]:
        """Bytes of the device that each graph took when it was captured, in that order."""
        return list(self._taken)

    def _capture(self, size: int) -> _Captured:
        inputs = DeviceInputs.over(self._buffer, self.shape(size))
        self._forward(inputs)  # compiles kernels and makes workspaces, which a capture may not
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info(self._buffer.device)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = self._forward(inputs).contiguous()
        self._pool = self._pool or graph.pool()
        self._captured[size] = _Captured(graph, borrowed(logits))
        self._taken.append(max(0, free - torch.cuda.mem_get_info(self._buffer.device)[0]))
        logger.debug("captured a decode graph of %d sequences", size)
        return self._captured[size]

"""Steps as CUDA graphs: one for each shape of a short ladder, captured when first needed."""

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


class StepGraphs:
    """Graphs of `forward`, which turns DeviceInputs of a step into logits, a row for each sequence.

    All read one input buffer and take their memory from `pool`: the logits of a replay are good until the next one of
    any graph of that pool. stream: where everything of the runner happens.
    """

    def __init__(
        self,
        forward: Callable[[DeviceInputs], torch.Tensor],
        *,
        largest: InputShape,
        device: torch.device,
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        self._forward = forward
        self._stream = stream
        self._buffer = torch.zeros(largest.offsets()[-1], dtype=torch.uint8, device=device)
        self._captured: dict[InputShape, _Captured] = {}
        self._taken: list[int] = []
        self._pool = pool

    @property
    def buffer(self) -> torch.Tensor:
        """Where the inputs of the next replay are put, laid out as its InputShape says."""
        return self._buffer

    def replay(self, shape: InputShape) -> torch.Tensor:
        """Logits of the inputs in the buffer; enqueued on the stream, nothing is waited for."""
        captured = self._captured.get(shape) or self._capture(shape)
        captured.graph.replay()
        return captured.logits

    def graph_bytes(self) -> list[int]:
        """Bytes of the device that each graph took beside torch's memory, in the order of their capture."""
        return list(self._taken)

    def _outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self._buffer.device)
        return total - free - torch.cuda.memory_reserved(self._buffer.device)

    def _capture(self, shape: InputShape) -> _Captured:
        inputs = DeviceInputs.over(self._buffer, shape)
        self._forward(inputs)  # compiles kernels and makes workspaces, which a capture may not
        torch.cuda.synchronize()
        before = self._outside()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = self._forward(inputs).contiguous()
        self._captured[shape] = _Captured(graph, borrowed(logits))
        self._taken.append(max(0, self._outside() - before))
        logger.debug("captured a graph of %d tokens of %d sequences", shape.tokens, shape.sequences)
        return self._captured[shape]


class DecodeShapes:
    """Shapes of decode steps, a token for each sequence: one for each of a few batch sizes."""

    def __init__(self, max_rows: int, blocks: int) -> None:
        self._sizes = batch_sizes(max_rows)
        self._blocks = blocks

    @property
    def largest(self) -> InputShape:
        """The shape of the largest step."""
        return self.of(self._sizes[-1])

    def of(self, rows: int) -> InputShape:
        """The smallest shape for `rows` sequences."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        return InputShape(tokens=size, sequences=size, prefills=0, blocks=self._blocks)


TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
SEQUENCES = (1, 8, 16, 32, 64, 128, 256)


class MixedShapes:
    """Shapes of small steps with prompt chunks, where launching kernels one by one would take longer than they do.

    Every sequence goes through the prefill kernel, which does not split long contexts over programs: so there is a
    longest one.
    """

    longest = 4096

    def __init__(self, max_rows: int, max_tokens: int, blocks: int) -> None:
        self._tokens = [size for size in TOKENS if size < max_tokens] + ([max_tokens] if max_tokens <= 1024 else [])
        self._sequences = [size for size in SEQUENCES if size < max_rows] + [max_rows]
        self._blocks = blocks

    @property
    def largest(self) -> InputShape:
        """The shape of the largest step."""
        return InputShape(self._tokens[-1], self._sequences[-1], self._sequences[-1], self._blocks)

    def of(self, tokens: int, sequences: int, length: int) -> InputShape | None:
        """The smallest shape for a step with sequences of up to `length` tokens; None for one that is run eagerly."""
        if tokens > self._tokens[-1] or sequences > self._sequences[-1] or length > self.longest:
            return None
        size = self._tokens[bisect_left(self._tokens, tokens)]
        rows = self._sequences[bisect_left(self._sequences, sequences)]
        return InputShape(tokens=size, sequences=rows, prefills=rows, blocks=self._blocks)

"""Steps as CUDA graphs: one for each shape of a short ladder, captured when first needed."""

from __future__ import annotations

import contextlib
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qengine.engine.device_inputs import DeviceInputs, InputShape
from qengine.engine.gpu_memory import outside_bytes, with_room

logger = logging.getLogger(__name__)


def batch_sizes(largest: int, tile: int) -> list[int]:
    """The batch sizes that get a graph: those that fill the packed products' tiles, of up to `tile` rows.

    A tile costs the same however few of its rows there are; on an H200 one that is not full costs up to a third more.
    """
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(128, 1025, tile)]
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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected within.

    While torch records for a capture or allocates from a pool, a graph that is collected spoils the capture, and a
    MemPool that is ends the process ("captures_underway", seen with torch 2.11).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class StepGraphs:
    """Graphs of `forward`, which turns DeviceInputs of a step into logits, a row for each sequence.

    All read one input buffer and take their memory from `pool`: the logits of a replay are good until the next step of
    any kind that computes in that pool. stream: where everything of the runner happens.

    The first step of a shape is computed kernel by kernel; its graph is captured while the device does so, and then
    replayed.
    """

    def __init__(
        self,
        forward: Callable[[DeviceInputs], torch.Tensor],
        *,
        largest: InputShape,
        device: torch.device,
        stream: torch.cuda.Stream,
        pool: torch.cuda.MemPool,
    ) -> None:
        self._forward = forward
        self._stream = stream
        self._buffer = torch.zeros(largest.offsets()[-1], dtype=torch.uint8, device=device)
        self._captured: dict[InputShape, _Captured] = {}
        self._refused: set[InputShape] = set()
        self._abandoned: torch.cuda.CUDAGraph | None = None
        self._taken: list[int] = []
        self._pool = pool
        self._handle: Any = pool.id
        self.on_capture: Callable[[], None] | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """Where the inputs of the next replay are put, laid out as its InputShape says."""
        return self._buffer

    def knows(self, shape: InputShape) -> bool:
        """Whether a step of this shape was there before: its graph is captured, or has no room."""
        return shape in self._captured or shape in self._refused

    def replay(self, shape: InputShape) -> torch.Tensor:
        """Logits of the inputs in the buffer; enqueued on the stream, nothing is waited for."""
        captured = self._captured.get(shape)
        if captured is not None:
            captured.graph.replay()
            return captured.logits
        inputs, device = DeviceInputs.over(self._buffer, shape), self._buffer.device
        logits = with_room(device, partial(self._compute, inputs))
        if shape in self._refused:
            return logits
        del logits  # the capture needs its memory; computing twice, and alike, costs less than the launches did
        try:
            with_room(device, partial(self._capture, shape, inputs))
        except torch.cuda.OutOfMemoryError:
            self._refused.add(shape)
            text = "there is no memory for the graph of %d tokens of %d sequences: such steps are not captured"
            logger.warning(text, shape.tokens, shape.sequences)
            return with_room(device, partial(self._compute, inputs))
        captured = self._captured[shape]
        captured.graph.replay()
        return captured.logits

    def _compute(self, inputs: DeviceInputs) -> torch.Tensor:
        """Kernel by kernel; compiles them, which a capture may not. The capture finds the memory in the pool."""
        with uncollected(), torch.cuda.use_mem_pool(self._pool):
            return self._forward(inputs).contiguous()

    def graph_bytes(self) -> list[int]:
        """Bytes of the device that each graph took beside torch's memory, in the order of their capture."""
        return list(self._taken)

    def _capture(self, shape: InputShape, inputs: DeviceInputs) -> None:
        """As torch.cuda.graph does it, but without waiting for the device and without emptying the allocator."""
        before = outside_bytes(self._buffer.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), uncollected():
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                logits = self._forward(inputs).contiguous()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        self._captured[shape] = _Captured(graph, borrowed(logits))
        self._taken.append(max(0, outside_bytes(self._buffer.device) - before))
        if self.on_capture is not None:
            self.on_capture()
        logger.debug("captured a graph of %d tokens of %d sequences", shape.tokens, shape.sequences)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the next step can run.

        The graph is kept until another one fails: when a pool's last graph goes, torch 2.11's pinned memory lets go of
        the pool as well, and the next capture in it raises "use_count > 0" half-way, after which the process ends.
        The one kept before goes when this capture is over: within, it would invalidate it, and torch before 2.12 cannot
        end such a one (github.com/pytorch/pytorch/pull/180395). Want of memory does not invalidate a capture.
        """
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        self._abandoned = graph


class DecodeShapes:
    """Shapes of decode steps, a token for each sequence: one for each of a few batch sizes. tile: see batch_sizes."""

    def __init__(self, max_rows: int, blocks: int, tile: int) -> None:
        self._sizes = batch_sizes(max_rows, tile)
        self._blocks = blocks

    @property
    def largest(self) -> InputShape:
        """The shape of the largest step."""
        return self.of(self._sizes[-1])

    def all(self) -> list[InputShape]:
        """Every shape, the largest first."""
        return [self.of(size) for size in reversed(self._sizes)]

    def of(self, rows: int) -> InputShape:
        """The smallest shape for `rows` sequences."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        return InputShape(tokens=size, sequences=size, prefills=0, blocks=self._blocks)


TOKENS = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
PREFILLS = (16, 64)
SINGLES = (16, 112, 240)
"""With the fewest PREFILLS these are 32, 128 and 256 rows of logits: whole tiles of the last layer's products."""


class MixedShapes:
    """Shapes of steps with prompt chunks, where launching kernels one by one would take longer than they do.

    Padding tokens cost as much as others, so their ladder is fine. Rows without a sequence cost little: those of single
    tokens programs of the decode kernel that leave at once, and rows of logits; those of prefills empty tiles.
    """

    def __init__(self, max_rows: int, max_tokens: int, blocks: int) -> None:
        most = min(max_tokens, TOKENS[-1])
        self._tokens = [size for size in TOKENS if size < most] + [most]
        self._singles = [size for size in SINGLES if size < max_rows] + [max_rows]
        self._blocks = blocks

    @property
    def largest(self) -> InputShape:
        """A shape whose arrays are as long as any's."""
        return self._shape(self._tokens[-1], self._singles[-1], PREFILLS[-1])

    def of(self, tokens: int, singles: int, prefills: int) -> InputShape | None:
        """The smallest shape for a step of so many tokens, sequences with one and with several of them.

        None for a step that is run eagerly.
        """
        if tokens > self._tokens[-1] or singles > self._singles[-1] or prefills > PREFILLS[-1]:
            return None
        size = self._tokens[bisect_left(self._tokens, tokens)]
        rows = self._singles[bisect_left(self._singles, singles)]
        return self._shape(size, rows, PREFILLS[bisect_left(PREFILLS, prefills)])

    def usual(self) -> list[InputShape]:
        """The shapes for up to PREFILLS[0] prompts at once, the largest first."""
        found = (self._shape(size, rows, PREFILLS[0]) for size in self._tokens for rows in self._singles)
        return sorted(set(found), key=lambda shape: (shape.tokens, shape.sequences), reverse=True)

    def _shape(self, tokens: int, singles: int, prefills: int) -> InputShape:
        """No more rows than so many tokens can need."""
        singles, prefills = min(singles, tokens), min(prefills, max(1, tokens // 2))
        return InputShape(tokens, singles + prefills, prefills, self._blocks)

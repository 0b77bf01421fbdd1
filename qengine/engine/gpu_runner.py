"""Computes a step on a GPU: fused kernels over a paged pool, decode steps as CUDA graphs, sampling on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from qengine.engine.block_manager import Copy
from qengine.engine.cuda_graphs import PREFILLS, DecodeShapes, MixedShapes, StepGraphs, uncollected
from qengine.engine.cuda_swap import CudaSwapDevice
from qengine.engine.device_inputs import DeviceInputs, InputShape, InputStaging
from qengine.engine.gpu_memory import with_room
from qengine.engine.graph_limits import graph_tokens, tile_rows
from qengine.engine.memory_guard import MemoryGuard
from qengine.engine.runner import LOGIT_ROWS, RunnerBase
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs
from qengine.engine.sampler_gpu import Drawn, GpuSampler
from qengine.engine.step import NO_SWAP, StepItem, StepResult
from qengine.engine.swap import SwapDevice
from qengine.engine.swap_orders import SwapOrders
from qengine.kernels.fused.ids import resolve_ids
from qengine.kernels.paged_attn.blocks import copy_blocks
from qengine.kernels.paged_attn.cache import KVPool
from qengine.kernels.w4a16.ops import release, reserve
from qengine.layers.attention_device import DeviceBatch, DeviceContext, pool_layers
from qengine.models import Decoder


@dataclass
class LaunchedStep:
    """A step under way on the device. order: places of its items among the engine's."""

    _sample: Callable[[], Drawn | None]
    _items: list[StepItem]
    _order: list[int]
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    _drawn: Drawn | None = None

    def draw(self) -> None:
        """See Launched."""
        self._drawn = self._sample()

    def result(self) -> StepResult:
        """Wait for the sampled tokens."""
        if self._drawn is None:
            return StepResult(Samples([], []), self.scores)
        return StepResult(in_order(self._drawn.samples(), self._items, self._order), self.scores)


class GpuRunner(RunnerBase):
    """Runs a Decoder on a KVPool. vocab_size: ids from here on are padding and never sampled.

    max_num_seqs, max_num_batched_tokens, max_model_len: of the largest step and sequence. graphs: replay decode steps,
    and small steps with prompt chunks, as CUDA graphs.
    stream: where everything is enqueued, so that graphs and eager steps share their workspaces.

    `launch` puts a step on the stream and returns. A sequence whose last token the step before is still sampling gets
    it on the device, from the sampler's own output; so two steps can be under way, and no more.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        vocab_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        graphs: bool,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(model, vocab_size)
        self._pool = pool
        self._layers = pool_layers(pool)
        self._max_len = max_model_len
        self._max_rows = max_num_seqs
        self._stream = stream
        self._staging = InputStaging(model.device, pool.layout.block_size)
        self._sampler = GpuSampler(max_num_seqs, vocab_size, model.device)
        self._sampled: list[SampleRow] = []
        blocks = -(-max_model_len // pool.layout.block_size)
        self._decode_shapes = DecodeShapes(max_num_seqs, blocks, tile_rows(model.device))
        most = min(max_num_batched_tokens, graph_tokens(model.spec, model.device))
        self._mixed_shapes = MixedShapes(max_num_seqs, most, blocks)
        self._guard: MemoryGuard | None = None
        self._graphs: tuple[StepGraphs, StepGraphs] | None = None
        self._memory: torch.cuda.MemPool | None = None
        reserve(model.device, stream)  # before the first step, whose memory it would else be in
        if graphs:
            with torch.cuda.device(model.device):
                memory = self._memory = torch.cuda.MemPool()
            both = ((self._decode, self._decode_shapes.largest), (self._mixed, self._mixed_shapes.largest))
            decode, mixed = (
                StepGraphs(forward, largest=largest, device=model.device, stream=stream, pool=memory)
                for forward, largest in both
            )
            self._graphs = decode, mixed

    def guard_memory(self, guard: MemoryGuard) -> None:
        """Check the limit before steps, until the runner is closed."""
        self._guard = guard
        self.at_close(guard.close)
        for graphs in self._graphs or ():
            graphs.on_capture = guard.grown

    @property
    def overlaps(self) -> bool:
        """See StepRunner."""
        return True

    @torch.inference_mode()
    def launch(
        self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP, *, later: bool = False
    ) -> LaunchedStep:
        """See StepRunner. Only prompt logprobs are waited for here."""
        if self._guard is not None:
            self._guard.check()
        with torch.cuda.stream(self._stream):
            self._begin_step(swap)
            self._copy_blocks(copies)
            order = sorted(range(len(items)), key=lambda i: items[i].end - items[i].start > 1)
            ordered = [items[i] for i in order]
            if not items:
                return LaunchedStep(lambda: None, [], [])
            logits, hidden = self._replay(ordered), None
            if logits is None:
                logits, hidden = with_room(self.model.device, partial(self._compute, ordered))
            step = LaunchedStep(partial(self._draw, ordered, logits), ordered, order)
            if not later:
                step.draw()
            if hidden is not None:
                step.scores = self._score(ordered, hidden)
            return step

    def close(self) -> None:
        """Wait for the device and let go of all its memory that the runner's tensors do not hold."""
        torch.cuda.synchronize(self.model.device)
        super().close()
        self._graphs = self._memory = None
        release(self.model.device)
        clear_cublas = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # 33 MiB a stream, else kept for ever
        if clear_cublas is not None:
            clear_cublas()

    @property
    def block_bytes(self) -> int:
        """See RunnerBase."""
        return KVPool.bytes_per_block(self._pool.num_layers, self._pool.layout)

    def graph_bytes(self) -> list[int]:
        """Bytes that each CUDA graph took, in the order of their capture."""
        return [] if self._graphs is None else [size for graphs in self._graphs for size in graphs.graph_bytes()]

    @property
    def most_graphs(self) -> int:
        """Graphs that may be captured."""
        mixed = len(PREFILLS) * len(self._mixed_shapes.usual())
        return 0 if self._graphs is None else len(self._decode_shapes.all()) + mixed

    @torch.inference_mode()
    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """See StepRunner: captures the graphs of all decode steps, and of mixed ones with a usual number of prompts."""
        if self._graphs is None:
            return True
        decode, mixed = self._graphs
        for graphs, shapes in ((mixed, self._mixed_shapes.usual()), (decode, self._decode_shapes.all())):
            for shape in shapes:
                if graphs.knows(shape):
                    continue
                if stop():
                    return False
                with torch.cuda.stream(self._stream):
                    self._staging.stage([], shape, {}, graphs.buffer)
                    graphs.replay(shape)
                torch.cuda.synchronize(self.model.device)  # else a request that comes now would wait for several
        return True

    def _swap_device(self, num_cpu_blocks: int, memory: torch.Tensor | None) -> SwapDevice:
        return CudaSwapDevice(self._pool, num_cpu_blocks, self._stream, memory)

    def _copy_blocks(self, copies: list[Copy]) -> None:
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64).pin_memory()
            copy_blocks(self._pool, pairs.to(self.model.device, non_blocking=True))

    def _unknown(self, items: list[StepItem]) -> dict[int, int]:
        """seq_id -> row of the step before, for sequences whose last token that step samples."""
        waiting = [item for item in items if item.token_ids[item.end - 1] < 0]
        if not waiting:
            return {}
        rows = {id(row): index for index, row in enumerate(self._sampled)}
        return {item.seq_id: rows[id(item.rows[0])] for item in waiting}

    def _replay(self, items: list[StepItem]) -> torch.Tensor | None:
        """Logits of a step by a graph, a row for each item that samples; None for a step that needs to run eagerly."""
        if self._graphs is None or any(item.scored for item in items):
            return None
        decode, mixed = self._graphs
        tokens = sum(item.end - item.start for item in items)
        if tokens == len(items) and all(item.rows for item in items):
            graphs, shape = decode, self._decode_shapes.of(tokens)
        else:
            singles = sum(item.end - item.start == 1 for item in items)
            found = self._mixed_shapes.of(tokens, singles, len(items) - singles)
            if found is None:
                return None
            graphs, shape = mixed, found
        self._staging.stage(items, shape, self._unknown(items), graphs.buffer)
        return graphs.replay(shape)

    def _decode(self, inputs: DeviceInputs) -> torch.Tensor:
        """Logits [B, V] of B sequences with one new token each."""
        rows = inputs.seq_lens.shape[0]
        batch = DeviceBatch(
            inputs.tables, inputs.seq_lens, inputs.slots, rows, max_seq_len=self._max_len, lengths=inputs.lengths
        )
        return self._logits(self._forward(inputs, batch))

    def _mixed(self, inputs: DeviceInputs) -> torch.Tensor:
        """Logits [S, V] of the tokens at `inputs.lasts`, as many as may sample."""
        batch = DeviceBatch(
            inputs.tables,
            inputs.seq_lens,
            inputs.slots,
            inputs.seq_lens.shape[0] - inputs.query_starts.shape[0] + 1,
            max_seq_len=self._max_len,
            query_starts=inputs.query_starts,
            max_query_len=inputs.ids.shape[0],
            lengths=inputs.lengths,
        )
        return self._logits(self._forward(inputs, batch, inputs.lasts[: self._max_rows]))

    def _compute(self, items: list[StepItem]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`_eager`, in the memory that graphs have: one step at a time needs it."""
        if self._memory is None:
            return self._eager(items)
        with uncollected(), torch.cuda.use_mem_pool(self._memory):
            return self._eager(items)

    def _eager(self, items: list[StepItem]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of any step, single tokens first: logits [S, V] with a row for each item that has rows, if any has; and
        hidden states [T, H] of all tokens where prompt logprobs are wanted."""
        counts = [item.end - item.start for item in items]
        decode = sum(count == 1 for count in counts)
        blocks = max(len(item.block_table) for item in items)
        shape = InputShape(sum(counts), len(items), len(items) - decode, blocks)
        inputs = self._staging.stage(items, shape, self._unknown(items))
        batch = DeviceBatch(
            inputs.tables,
            inputs.seq_lens,
            inputs.slots,
            decode,
            max_seq_len=max(item.end for item in items),
            query_starts=inputs.query_starts if decode < len(items) else None,
            max_query_len=max(counts),
            lengths=inputs.lengths,
        )
        sampling = sum(bool(item.rows) for item in items)
        lasts = inputs.lasts[: max(1, sampling)]
        if not any(item.scored for item in items):
            last = self._forward(inputs, batch, lasts)
            return self._logits(last) if sampling else None, None
        hidden = self._forward(inputs, batch)
        return self._logits(hidden.index_select(0, lasts)) if sampling else None, hidden

    def _forward(self, inputs: DeviceInputs, batch: DeviceBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        ids = resolve_ids(inputs.ids, self._sampler.tokens)
        return self.model.forward(ids, inputs.positions, DeviceContext(self._layers, batch), rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In float16 or float32, as the sampler takes them."""
        logits = self.model.raw_logits(hidden)
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    @torch.inference_mode()
    def _draw(self, items: list[StepItem], logits: torch.Tensor | None) -> Drawn | None:
        """A token for each row of the items, from logits with a row for each item that has rows."""
        rows = [row for item in items for row in item.rows]
        if not rows:
            return None
        assert logits is not None, "items with rows have logits"
        drawing = (item for item in items if item.rows)
        sources = [index for index, item in enumerate(drawing) for _ in item.rows]
        with torch.cuda.stream(self._stream):
            batch = self._sampler.prepare(rows, sources)
            self._sampler.run(logits, batch)
            self._sampled = rows
            return self._sampler.fetch(logits, batch)

    def _score(self, items: list[StepItem], hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of prompt tokens, LOGIT_ROWS positions at a time."""
        result: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for item in items:
            for first in range(item.scored.start, item.scored.stop, LOGIT_ROWS):
                end = min(first + LOGIT_ROWS, item.scored.stop)
                rows = hidden[offset + first - item.start : offset + end - item.start]
                targets = item.token_ids[first + 1 : end + 1]
                counts = [item.num_logprobs] * len(targets)
                scores = self._sampler.logprobs_of(self._logits(rows), targets, counts)
                result.setdefault(item.seq_id, []).extend(scores)
            offset += item.end - item.start
        return result


def in_order(samples: Samples, items: list[StepItem], order: list[int]) -> Samples:
    """Samples of `items`, which are the engine's in another `order`, in the engine's own order."""
    if order == list(range(len(order))):
        return samples
    starts, at = {}, 0
    for place, item in zip(order, items, strict=True):
        starts[place] = range(at, at + len(item.rows))
        at += len(item.rows)
    rows = [row for place in range(len(order)) for row in starts[place]]
    logprobs = [samples.logprobs[row] for row in rows] if samples.logprobs else []
    return Samples([samples.token_ids[row] for row in rows], [samples.valid[row] for row in rows], logprobs)

"""Computes a step: owns the model and the KV cache tensors, knows nothing of queues or text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qengine.engine.block_manager import Copy
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs, logprobs_of, sample
from qengine.engine.step import NO_SWAP, Done, Launched, StepItem, StepResult
from qengine.engine.swap import SwapDevice, SwapSpace, TensorSwapDevice
from qengine.engine.swap_orders import SwapOrders
from qengine.layers.attention import KVCache, PagedBatch, PagedContext
from qengine.models import Decoder

LOGIT_ROWS = 128
"""Prompt positions whose logits are held at once."""


class RunnerBase:
    """What all runners share: from hidden states to tokens and logprobs. vocab_size: see Runner."""

    def __init__(self, model: Decoder, vocab_size: int) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._swap: SwapSpace | None = None
        self._at_close: list[Callable[[], None]] = []

    @property
    def overlaps(self) -> bool:
        """See StepRunner."""
        return False

    def launch(
        self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP, *, later: bool = False
    ) -> Launched:
        """See StepRunner."""
        assert not later, "this runner's steps do not overlap"
        return Done(self.run(items, copies, swap))

    def run(self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP) -> StepResult:
        """See StepRunner."""
        return self.launch(items, copies, swap).result()

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """See StepRunner. Nothing here."""
        return True

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block over all layers."""
        raise NotImplementedError

    def open_swap(self, num_cpu_blocks: int, memory: torch.Tensor | None = None) -> SwapSpace:
        """Take CPU memory for so many blocks; `run` carries out swap orders from now on. Raises CapacityError.

        memory: uint8, of so many blocks, to be used where the CPU memory must be pinned.
        """
        self._swap = SwapSpace(self._swap_device(num_cpu_blocks, memory))
        return self._swap

    def at_close(self, call: Callable[[], None]) -> None:
        """Call this first when the runner is closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Give back the CPU memory for swapping; nothing is run after this."""
        while self._at_close:
            self._at_close.pop()()
        if self._swap is not None:
            self._swap.close()
            self._swap = None

    def _swap_device(self, num_cpu_blocks: int, memory: torch.Tensor | None) -> SwapDevice:
        raise NotImplementedError

    def _begin_step(self, swap: SwapOrders) -> None:
        """The copies between the tiers; before anything of the step is enqueued."""
        assert self._swap is not None or not swap, "swap orders without CPU memory to swap to"
        if self._swap is not None:
            self._swap.begin_step(swap)

    def _sample(self, items: list[StepItem], hidden: torch.Tensor) -> Samples:
        """Logits of the last position of each item that samples, and a token for each of its rows."""
        last: list[int] = []
        repeat: list[int] = []
        rows: list[SampleRow] = []
        offset = 0
        for item in items:
            offset += item.end - item.start
            if item.rows:
                repeat += [len(last)] * len(item.rows)
                last.append(offset - 1)
                rows += item.rows
        if not rows:
            return Samples([], [])
        logits = self.model.logits(hidden[torch.tensor(last, device=hidden.device)])
        if len(repeat) != len(last):
            logits = logits[torch.tensor(repeat, device=hidden.device)]
        return sample(logits, rows, self._vocab_size)

    def _sample_logits(self, items: list[StepItem], logits: torch.Tensor) -> Samples:
        """The same from logits [len(items), V], a row for each item."""
        rows = [row for item in items for row in item.rows]
        repeat = [index for index, item in enumerate(items) for _ in item.rows]
        if repeat != list(range(len(logits))):
            logits = logits[torch.tensor(repeat, device=logits.device)]
        return sample(logits.float(), rows, self._vocab_size) if rows else Samples([], [])

    def _score(self, items: list[StepItem], hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of prompt tokens, LOGIT_ROWS positions at a time."""
        result: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for item in items:
            scores: list[TokenLogprobs] = []
            for first in range(item.scored.start, item.scored.stop, LOGIT_ROWS):
                end = min(first + LOGIT_ROWS, item.scored.stop)
                rows = hidden[offset + first - item.start : offset + end - item.start]
                targets = item.token_ids[first + 1 : end + 1]
                counts = [item.num_logprobs] * len(targets)
                scores += logprobs_of(self.model.logits(rows), targets, counts, self._vocab_size)
            if scores:
                result[item.seq_id] = scores
            offset += item.end - item.start
        return result


class Runner(RunnerBase):
    """Runs a Decoder on a paged cache in plain torch. vocab_size: ids from here on are padding and never sampled."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self._cache = cache
        self._block_size = block_size

    @property
    def block_bytes(self) -> int:
        """See RunnerBase."""
        return sum(layer[0].nbytes for layers in (self._cache.k, self._cache.v) for layer in layers)

    def _swap_device(self, num_cpu_blocks: int, memory: torch.Tensor | None) -> SwapDevice:
        return TensorSwapDevice([*self._cache.k, *self._cache.v], num_cpu_blocks)

    @torch.inference_mode()
    def run(self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP) -> StepResult:
        """One step. The only wait for the device is for the sampled tokens and logprobs."""
        self._begin_step(swap)
        self._copy_blocks(copies)
        ids, positions, batch = self._inputs(items)
        hidden = self.model.forward(ids, positions, PagedContext(self._cache, batch))
        return StepResult(self._sample(items, hidden), self._score(items, hidden))

    def _copy_blocks(self, copies: list[Copy]) -> None:
        """Copy whole blocks in all layers; the sources are read before any destination is written."""
        if not copies:
            return
        source, target = torch.tensor(copies, dtype=torch.int64, device=self.model.device).unbind(dim=1)
        for layers in (self._cache.k, self._cache.v):
            for layer in layers:
                layer[target] = layer[source]

    def _inputs(self, items: list[StepItem]) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
        """Token ids [T], positions [T] and the batch description, built as lists and moved to the device once."""
        size, device = self._block_size, self.model.device
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for item in items:
            ids += item.token_ids[item.start : item.end]
            positions += range(item.start, item.end)
            table = item.block_table
            slots += [table[p // size] * size + p % size for p in range(item.start, item.end)]
        widest = max(len(item.block_table) for item in items)
        tables = [item.block_table + [0] * (widest - len(item.block_table)) for item in items]
        batch = PagedBatch(
            query_lens=[item.end - item.start for item in items],
            context_lens=[item.start for item in items],
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            prompt_lens=[len(item.token_ids) for item in items],
        )
        both = torch.tensor([ids, positions], dtype=torch.int64, device=device)
        return both[0], both[1], batch

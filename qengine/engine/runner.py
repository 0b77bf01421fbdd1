"""Computes a step on the device: owns the model and the KV cache tensors, knows nothing of queues or text."""

from __future__ import annotations

import torch

from qengine.engine.block_manager import Copy
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs, logprobs_of, sample
from qengine.engine.step import StepItem, StepResult
from qengine.layers.attention import KVCache, PagedBatch, PagedContext
from qengine.models import Decoder

LOGIT_ROWS = 128
"""Prompt positions whose logits are held at once."""


class Runner:
    """Runs a Decoder on a paged cache. vocab_size: ids from here on are padding and never sampled."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int, vocab_size: int) -> None:
        self.model = model
        self._cache = cache
        self._block_size = block_size
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def run(self, items: list[StepItem], copies: list[Copy]) -> StepResult:
        """One step. The only wait for the device is for the sampled tokens and logprobs."""
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

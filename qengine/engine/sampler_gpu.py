"""Sampling on the device: what `sampler.sample` does on the CPU, by the kernels of kernels/fused/sampling.py.

A step has three parts, so that a runner can overlap them with other work and put the middle one in a CUDA graph:

    batch = sampler.prepare(rows, sources)     host work and one copy to the device, two with grammars
    sampler.run(logits, batch)                 launches only; batch.tokens is the next step's input, on the device
    drawn = sampler.fetch(logits, batch)       starts one copy to the host; drawn.samples() waits for it

The rules are sampler.py's and logit_rules.py's: the same order, the same draws from the same uniform numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from qengine.engine.row_parameters import RowCache
from qengine.engine.sampler import SampleRow, Samples, TokenLogprobs, logprobs_of
from qengine.engine.token_counts import TokenCounts
from qengine.engine.token_masks import fill_masks
from qengine.kernels.fused.sampling import (
    ENTRY_VALUES,
    MOST_TOP,
    PARAMETERS,
    Inputs,
    Plan,
    Shape,
    Workspace,
    sample_rows,
    token_logprobs,
)
from qengine.kernels.fused.sampling_ref import column
from qengine.structured.matcher import mask_words

FRONT = PARAMETERS + 3
"""float64 values a row before the entries: its parameters, its place among ruled rows, two for a line of logprobs."""


@dataclass(frozen=True)
class Batch:
    """A prepared step. tokens int64 [R]: the device's own, filled by `run`. sources: row of the logits for each row."""

    plan: Plan
    tokens: torch.Tensor
    out: torch.Tensor
    rows: list[SampleRow]
    sources: list[int]
    lined: list[int]
    sorted: list[int]


@dataclass
class Drawn:
    """Results on their way to the host."""

    _batch: Batch
    _out: torch.Tensor
    _lines: torch.Tensor | None
    _sorted: torch.Tensor | None
    _done: torch.cuda.Event | None
    _vocab: int

    def samples(self) -> Samples:
        """Tokens, validity and logprobs; waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        token_ids, valid = self._out.tolist()
        rows = self._batch.rows
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if self._lines is not None:
            counts = [min(rows[i].params.logprobs or 0, self._vocab) for i in self._batch.lined]
            tokens = [token_ids[i] for i in self._batch.lined]
            for i, item in zip(self._batch.lined, _read_lines(self._lines, tokens, counts), strict=True):
                logprobs[i] = item
        if self._sorted is not None:
            counts = [rows[i].params.logprobs or 0 for i in self._batch.sorted]
            tokens = [token_ids[i] for i in self._batch.sorted]
            for i, item in zip(self._batch.sorted, logprobs_of(self._sorted, tokens, counts, self._vocab), strict=True):
                logprobs[i] = item
        count = len(rows)
        return Samples(token_ids[:count], [bool(v) for v in valid[:count]], logprobs)


class GpuSampler:
    """Owns the sampler's device tensors. max_rows: most rows of a step; vocab_size: ids from here on are never sampled.
    shape: launch constants, for tests and tuning.

    One stream uses it at a time. On the CPU the kernels' reference computes the same, slowly.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, *, shape: Shape | None = None
    ) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.work = Workspace(max_rows, vocab_size, self.device, shape)
        self.counts = TokenCounts(vocab_size, self.device)
        self._cache = RowCache(vocab_size)
        self._parameters = torch.zeros(max_rows * FRONT, dtype=torch.float64, device=self.device)
        self._out = torch.zeros(2 * max_rows, dtype=torch.int64, device=self.device)
        self._changed: torch.Tensor | None = None
        self._masks = torch.zeros(1, mask_words(vocab_size), dtype=torch.int32, device=self.device)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [max_rows], where `run` leaves the tokens of a step's rows; always the same memory."""
        return self._out[: self.max_rows]

    def prepare(self, rows: list[SampleRow], sources: list[int] | None = None, *, padded: int = 0) -> Batch:
        """Put a step's parameters on the device: one copy, on the current stream, and one of the rows' masks.

        sources: row of the logits for each row; None is 0, 1, 2, ... A row's token_ids may end with ids below 0, which
        stand for tokens that steps before are still sampling. padded: rows of the batch, those after `rows` being
        skipped (their tokens stay as they are), for a CUDA graph of that size.

        Raises ValueError for more rows than max_rows, or for bad_words or a grammar after a token not known yet.
        """
        count = max(len(rows), padded)
        if count > self.max_rows:
            raise ValueError(f"sampler: {count} rows are more than max_rows={self.max_rows}")
        if any(row.needs_tokens and row.token_ids[-1] < 0 for row in rows):
            raise ValueError("sampler: bad_words and grammars look at the tokens so far; wait for them before a draw")
        sources = list(range(len(rows))) if sources is None else sources
        table, entries = self._cache.table(rows, sources)
        self._place_masks(table, rows)
        ruled = self._place_rules(table, rows)
        lined = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        long = [i for i in lined if not 0 <= (rows[i].params.logprobs or 0) <= MOST_TOP]
        lined = [i for i in lined if i not in long]
        top = max((rows[i].params.logprobs or 0 for i in lined), default=0)
        plan = self._cache.plan(table, count)
        plan = replace(plan, ruled=len(ruled), entries=len(entries), lines=len(lined), top=min(top, self.vocab_size))
        self._upload(table, ruled, [(sources[i], i) for i in lined], entries, count)
        out = self._out[: 2 * count].view(2, count)
        return Batch(plan, out[0], out, rows, sources, lined, long)

    def run(self, logits: torch.Tensor, batch: Batch) -> None:
        """Launch the kernels that fill batch.tokens and batch.out; nothing waits.

        logits: float32 or float16 [., V], not changed. A plan that is `fixed` can be captured in a CUDA graph, and
        replayed for every batch with an equal plan, prepared outside it.
        """
        plan = batch.plan
        if plan.ruled and (self._changed is None or self._changed.shape[0] < plan.ruled):
            self._changed = None  # the old one first: two need not fit
            rows = min(self.max_rows, 1 << (plan.ruled - 1).bit_length())
            width = -(-self.vocab_size // 16) * 16
            self._changed = torch.empty(rows, width, dtype=torch.float32, device=self.device)
        changed = self._changed if plan.ruled else None
        sample_rows(logits, self._inputs(plan), plan, self.work, batch.out, changed, self.counts.table, self._masks)

    def fetch(self, logits: torch.Tensor, batch: Batch) -> Drawn:
        """Start copying the results of `run` to the host, with the logprobs that rows asked for."""
        lines = self._to_host(self.token_lines(logits, batch)) if batch.plan.lines else None
        kept = None
        if batch.sorted:
            at = _to_device(np.array([batch.sources[i] for i in batch.sorted]), self.device)
            kept = logits.index_select(0, at).float()
        out = self._to_host(batch.out)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Drawn(batch, out, lines, kept, done, self.vocab_size)

    def token_lines(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The logprobs of the batch's tokens on the device, as kernels.fused.sampling.token_logprobs gives them."""
        lines = self._inputs(batch.plan).lines
        return token_logprobs(logits, lines, batch.tokens, self.vocab_size, batch.plan.top, self.work.shape)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow], sources: list[int] | None = None) -> Samples:
        """A token for each row, on the host: prepare, run, fetch and wait."""
        batch = self.prepare(rows, sources)
        self.run(logits, batch)
        return self.fetch(logits, batch).samples()

    def logprobs_of(self, logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
        """For each row the logprob of its token and of its most likely `counts[row]` tokens (-1: all), on the host.

        logits: float32 or float16 [R, V], raw. As sampler.logprobs_of; ranks count larger logits.
        """
        most = max(counts, default=0)
        if min(counts, default=0) < 0 or most > MOST_TOP:
            return logprobs_of(logits.float(), token_ids, counts, self.vocab_size)
        index = np.arange(len(token_ids), dtype=np.float64)
        lines = _to_device(np.stack([index, index], 1), self.device)
        tokens = _to_device(np.array(token_ids, dtype=np.int64), self.device)
        most = min(most, self.vocab_size)
        lists = token_logprobs(logits, lines, tokens, self.vocab_size, most).cpu()
        return _read_lines(lists, token_ids, [min(count, most) for count in counts])

    def _place_masks(self, table: np.ndarray, rows: list[SampleRow]) -> None:
        """Fill the masks of rows with a grammar, copy them to the device, and note each row's line."""
        masked = [i for i, row in enumerate(rows) if row.matcher is not None]
        if not masked:
            return
        host = torch.empty(
            len(masked), self._masks.shape[1], dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )  # as for the parameters, torch's cache keeps the block until the copy is done
        fill_masks([rows[i] for i in masked], host.numpy())
        if self._masks.shape[0] < len(masked):
            lines = min(self.max_rows, 1 << (len(masked) - 1).bit_length())
            self._masks = torch.zeros(lines, self._masks.shape[1], dtype=torch.int32, device=self.device)
        self._masks[: len(masked)].copy_(host, non_blocking=True)
        table[masked, column("ALLOW")] = [-1 - line for line in range(len(masked))]
        table[masked, column("CHANGED")] = 0

    def _place_rules(self, table: np.ndarray, rows: list[SampleRow]) -> list[int]:
        """Give rows that bans or biases change a row of the changed logits, and rows with penalties their counts."""
        changed, counts = self._cache.columns
        ruled = np.nonzero(table[:, changed] >= 0)[0].tolist()
        table[ruled, changed] = range(len(ruled))
        for i in np.nonzero(table[:, counts] >= 0)[0].tolist():
            table[i, counts] = self.counts.place(rows[i])
        return ruled

    def _upload(
        self, table: np.ndarray, ruled: list[int], lines: list[tuple[int, int]], entries: np.ndarray, count: int
    ) -> None:
        front = self.max_rows * FRONT
        needed = front + entries.size
        if needed > self._parameters.numel():
            grown = front + 2 * entries.size
            self._parameters = torch.zeros(grown, dtype=torch.float64, device=self.device)
        size = needed if entries.size else front if ruled or lines else count * PARAMETERS
        # pinned blocks come from torch's cache, which keeps one until the copies from it are done
        host = torch.empty(size, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        flat = host.numpy()
        flat[: table.size] = table.ravel()
        flat[table.size : count * PARAMETERS] = 0
        if size > count * PARAMETERS:
            at = self.max_rows * PARAMETERS
            flat[at : at + len(ruled)] = ruled
            at += self.max_rows
            flat[at : at + 2 * len(lines)] = np.array(lines, dtype=np.float64).ravel()
            flat[front:needed] = entries.ravel()
        self._parameters[:size].copy_(host, non_blocking=True)

    def _inputs(self, plan: Plan) -> Inputs:
        most, data = self.max_rows, self._parameters
        at = most * PARAMETERS
        front = most * FRONT
        return Inputs(
            rows=data[:at].view(most, PARAMETERS),
            ruled=data[at : at + plan.ruled],
            lines=data[at + most : at + most + 2 * plan.lines].view(plan.lines, 2),
            entries=data[front : front + ENTRY_VALUES * plan.entries].view(plan.entries, ENTRY_VALUES),
        )

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cuda":
            return x.clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device that does not wait for it."""
    x = torch.from_numpy(array)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _read_lines(lines: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """What token_logprobs wrote, for `counts[row]` tokens each."""
    top = (lines.shape[1] - 2) // 2
    numbers = lines.tolist()
    floats = lines.view(torch.float32).tolist()
    return [
        TokenLogprobs(
            [token, *ints[2 : 2 + count]],
            [own[0], *own[2 + top : 2 + top + count]],
            [ints[1], *range(1, count + 1)],
        )
        for token, count, ints, own in zip(token_ids, counts, numbers, floats, strict=True)
    ]

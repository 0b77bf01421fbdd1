"""What a step of paged attention has to read, worked out once and used by every layer.

Rows with one new token (decode) are gathered into few rectangular batches; rows with more (prefill) go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeRows:
    """Single-token rows that are attended together.

    rows: int64 [S], their places among the step's tokens, or None for all of them in order. slots: int64 [S, L], cache
    slots of the keys, or a slice of slots where S is 1 and its blocks lie one after the other. mask: additive
    [S, 1, 1, L] in float32, None where all rows have L keys.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor | slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PrefillRows:
    """New tokens start..stop of one sequence, preceded by `context` cached ones. slots: int64 [context + new]."""

    start: int
    stop: int
    context: int
    slots: torch.Tensor


class PagedPlan:
    """A step's rows, grouped. block_tables: int32 [S, max_blocks], entries beyond a row's length are never read."""

    def __init__(
        self, query_lens: list[int], context_lens: list[int], block_tables: torch.Tensor, block_size: int
    ) -> None:
        self.block_size = block_size
        self._tables = block_tables
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self.prefill: list[PrefillRows] = []
        start = 0
        for row, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            if count == 1:
                self._rows.append(row)
                self._starts.append(start)
                self._lengths.append(context + 1)
            elif count > 1:
                slots = self._slots([row], [0], [context + count])[0]
                self.prefill.append(PrefillRows(start, start + count, context, slots))
            start += count
        self._tokens = start
        self._decode: dict[int | None, list[DecodeRows]] = {}

    def decode(self, sliding_window: int | None) -> list[DecodeRows]:
        """Batches of the single-token rows for layers that see `sliding_window` tokens (None: all)."""
        if sliding_window not in self._decode:
            self._decode[sliding_window] = self._group(sliding_window)
        return self._decode[sliding_window]

    def _group(self, window: int | None) -> list[DecodeRows]:
        """Rows of like length together: padding is less than the keys themselves."""
        seen = [min(length, window) if window else length for length in self._lengths]
        if not seen:
            return []
        everything = len(seen) == self._tokens
        if everything and 2 * min(seen) >= max(seen):
            return [self._batch(list(range(len(seen))), seen, None)]
        groups: list[list[int]] = []
        for index in sorted(range(len(seen)), key=seen.__getitem__, reverse=True):
            if groups and 2 * seen[index] >= seen[groups[-1][0]]:
                groups[-1].append(index)
            else:
                groups.append([index])
        return [self._batch(group, seen, [self._starts[i] for i in group]) for group in groups]

    def _batch(self, group: list[int], seen: list[int], places: list[int] | None) -> DecodeRows:
        device = self._tables.device
        rows = None if places is None else torch.tensor(places, device=device)
        lengths = [seen[i] for i in group]
        firsts = [self._lengths[i] - seen[i] for i in group]
        table_rows = [self._rows[i] for i in group]
        if len(group) == 1:
            run = self._contiguous(table_rows[0], firsts[0], lengths[0])
            if run is not None:
                return DecodeRows(rows, run, None)
        slots = self._slots(table_rows, firsts, lengths)
        if min(lengths) == max(lengths):
            return DecodeRows(rows, slots, None)
        absent = torch.arange(slots.shape[1], device=device) >= torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(slots.shape, device=device).masked_fill_(absent, float("-inf"))
        return DecodeRows(rows, slots, mask[:, None, None])

    def _contiguous(self, row: int, first: int, length: int) -> slice | None:
        """The slots as a slice, if the blocks follow each other; not asked on a device, where reading would wait."""
        if self._tables.device.type != "cpu":
            return None
        low, high = first // self.block_size, (first + length - 1) // self.block_size
        blocks = self._tables[row, low : high + 1].tolist()
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        start = blocks[0] * self.block_size + first % self.block_size
        return slice(start, start + length)

    def _slots(self, rows: list[int], firsts: list[int], lengths: list[int]) -> torch.Tensor:
        """int64 [len(rows), max(lengths)]: slots of positions first, first + 1, ... of each row.

        Places beyond a row's length repeat its last slot, so that no other sequence's values are ever read.
        """
        device = self._tables.device
        offsets = torch.arange(max(lengths), device=device)[None]
        last = torch.tensor([[length - 1] for length in lengths], device=device)
        positions = torch.minimum(offsets, last) + torch.tensor([[first] for first in firsts], device=device)
        tables = self._tables[rows].long()
        return tables.gather(1, positions // self.block_size) * self.block_size + positions % self.block_size

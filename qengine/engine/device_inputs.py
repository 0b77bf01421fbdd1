"""A step's numbers on their way to the GPU: laid out in one pinned buffer, moved by one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qengine.engine.step import StepItem

BUFFERS = 3
"""Pinned buffers in turn, so that one can be filled while another's copy is under way."""

SPARE_TABLES = 64
"""Block tables of other sequences than a step's, beside as many as the step has, that are kept for their return."""


@dataclass(frozen=True)
class InputShape:
    """Sizes of a step's arrays: tokens, sequences, prefill sequences, and blocks of the longest table.

    Sequences with one new token have the first `sequences - prefills` rows, prefills the others.
    """

    tokens: int
    sequences: int
    prefills: int
    blocks: int

    def offsets(self) -> tuple[int, ...]:
        """First byte of ids, positions, slots, lengths (int64 [T]), lasts (int64 [S]); seq_lens [S], query_starts
        [P + 1], tables [S, MB] (int32); and the bytes of all."""
        sizes = [8 * self.tokens] * 4 + [8 * self.sequences]
        sizes += [4 * self.sequences, 4 * (self.prefills + 1), 4 * self.sequences * self.blocks]
        starts = [0]
        for size in sizes:
            starts.append((starts[-1] + size + 15) // 16 * 16)
        return tuple(starts)


@dataclass(frozen=True)
class DeviceInputs:
    """Views of one buffer: see InputShape.offsets. lasts: where the last tokens of sequences that sample are.

    query_starts: where each prefill's tokens begin, and the last one's end, among all tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    lasts: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def over(cls, buffer: torch.Tensor, shape: InputShape) -> DeviceInputs:
        """Views of uint8 `buffer`, which holds at least shape.offsets()[-1] bytes."""
        at = shape.offsets()
        ids, positions, slots, lengths = (buffer[at[i] : at[i] + 8 * shape.tokens].view(torch.int64) for i in range(4))
        lasts = buffer[at[4] : at[4] + 8 * shape.sequences].view(torch.int64)
        seq_lens = buffer[at[5] : at[5] + 4 * shape.sequences].view(torch.int32)
        starts = buffer[at[6] : at[6] + 4 * (shape.prefills + 1)].view(torch.int32)
        tables = buffer[at[7] : at[7] + 4 * shape.sequences * shape.blocks].view(torch.int32)
        tables = tables.view(shape.sequences, shape.blocks)
        return cls(ids, positions, slots, lengths, lasts, seq_lens, starts, tables)


class InputStaging:
    """Fills pinned buffers and copies them to the device on the current stream.

    tables hold the block ids of each sequence as numpy arrays from step to step, since a table grows by a block every
    block_size tokens: entries before the first new token's block are taken as they were while the engine hands in the
    same list. Those of sequences that are no longer seen are dropped once they are as many as the others.
    """

    def __init__(self, device: torch.device, block_size: int) -> None:
        self._device = device
        self._block_size = block_size
        self._pinned: list[torch.Tensor | None] = [None] * BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0
        self._tables: dict[int, tuple[list[int], np.ndarray]] = {}

    def stage(
        self,
        items: list[StepItem],
        shape: InputShape,
        unknown: dict[int, int],
        target: torch.Tensor | None = None,
    ) -> DeviceInputs:
        """The items' numbers on the device, padded to `shape`. target: uint8 buffer to copy to; None makes one.

        unknown: seq_id -> row, for sequences whose last token is not known yet: its id becomes -1 - row. Padding: slots
        -1, seq_lens 0, the rest 0. Items with one new token must come first.
        """
        host = self._host(shape.offsets()[-1])
        self._fill(items, DeviceInputs.over(host, shape), unknown)
        if target is None:
            target = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        target[: host.numel()].copy_(host, non_blocking=True)
        event = self._copied[self._turn] or torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = event
        self._turn = (self._turn + 1) % BUFFERS
        return DeviceInputs.over(target, shape)

    def _host(self, size: int) -> torch.Tensor:
        """The next pinned buffer, once the copy that last read it is over."""
        event, buffer = self._copied[self._turn], self._pinned[self._turn]
        if event is not None:
            event.synchronize()
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
            self._pinned[self._turn] = buffer
        return buffer[:size]

    def _fill(self, items: list[StepItem], into: DeviceInputs, unknown: dict[int, int]) -> None:
        ids, positions, slots, lengths = (x.numpy() for x in (into.ids, into.positions, into.slots, into.lengths))
        lasts, seq_lens = into.lasts.numpy(), into.seq_lens.numpy()
        starts, tables = into.query_starts.numpy(), into.tables.numpy()
        for array in (ids, positions, lengths, lasts, seq_lens, starts, tables):
            array.fill(0)
        slots.fill(-1)
        if len(self._tables) > 2 * len(items) + SPARE_TABLES:
            # one that comes back later, as after a preemption, is made anew
            current = {item.seq_id for item in items}
            self._tables = {seq_id: table for seq_id, table in self._tables.items() if seq_id in current}
        size, at, singles, prefills, sampling = self._block_size, 0, 0, 0, 0
        first_prefill = len(seq_lens) - len(starts) + 1
        for item in items:
            count, table = item.end - item.start, self._table(item)
            if count == 1:
                row, singles = singles, singles + 1
            else:
                row, starts[prefills] = first_prefill + prefills, at
                prefills += 1
            places = slice(at, at + count)
            tables[row, : len(table)] = table
            seq_lens[row] = item.end
            lengths[places] = max(item.end, len(item.token_ids))
            if count == 1:
                ids[at], positions[at] = item.token_ids[item.start], item.start
                slots[at] = int(table[item.start // size]) * size + item.start % size
            else:
                where = np.arange(item.start, item.end)
                ids[places], positions[places] = item.token_ids[item.start : item.end], where
                slots[places] = table[where // size].astype(np.int64) * size + where % size
            at += count
            if item.rows:
                lasts[sampling] = at - 1
                sampling += 1
            if item.seq_id in unknown:
                ids[at - 1] = -1 - unknown[item.seq_id]
        starts[prefills:] = at  # the last one's end, and sequences without tokens

    def _table(self, item: StepItem) -> np.ndarray:
        """The item's block table as int32."""
        known = self._tables.get(item.seq_id)
        count = len(item.block_table)
        if known is None or known[0] is not item.block_table or len(known[1]) < count:
            room = np.zeros(max(16, 2 * count), dtype=np.int32)
            room[:count] = item.block_table
            self._tables[item.seq_id] = (item.block_table, room)
            return room[:count]
        fresh = item.start // self._block_size
        known[1][fresh:count] = item.block_table[fresh:]
        return known[1][:count]

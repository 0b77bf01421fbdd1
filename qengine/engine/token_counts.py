"""Token counts of sequences with penalties, on the device, one row each for as long as the sequence's row lives."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch

from qengine.engine.sampler import SampleRow

PROMPT = -32768
MOST = 32767


@dataclass
class _Place:
    row: weakref.ref[SampleRow]
    place: int
    length: int


class TokenCounts:
    """table: int16 [places, V] or None while no sequence needs one; sampling_rules_kernel.py says what its bits mean.

    The sampler's kernels add each sampled token. A row whose number of tokens is not what was counted (new, or come
    back after a preemption with its tokens changed) is counted anew from its list, in one copy.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table: torch.Tensor | None = None
        self._vocab = vocab_size
        self._device = device
        self._places: dict[int, _Place] = {}
        self._free: list[int] = []

    def place(self, row: SampleRow) -> int:
        """The table's row for a sequence that is about to sample one token, made or brought up to date.

        Raises ValueError where a sequence must be counted anew while a token of it is not known yet (an id below 0).
        """
        length = len(row.token_ids)
        known = self._places.get(id(row))
        if known is None or known.row() is not row:
            known = self._take(row)
        if known.length != length:
            if row.token_ids and row.token_ids[-1] < 0:
                raise ValueError("sampler: a sequence with penalties must be counted from tokens that are known")
            self._count(known.place, row)
        # the token that is sampled now counts at once; should this step fail, the length no longer fits
        known.length = length + 1
        return known.place

    def forget(self, row: SampleRow) -> None:
        """Count a sequence anew at its next step (after a step that failed)."""
        known = self._places.get(id(row))
        if known is not None and known.row() is row:
            known.length = -1

    def _take(self, row: SampleRow) -> _Place:
        if not self._free:
            self._grow()
        where, places, free = id(row), self._places, self._free
        place = free.pop()

        def gone(ref: weakref.ref[SampleRow]) -> None:
            free.append(place)
            if where in places and places[where].row is ref:
                del places[where]

        known = places[where] = _Place(weakref.ref(row, gone), place, -1)
        return known

    def _grow(self) -> None:
        old = 0 if self.table is None else self.table.shape[0]
        width = -(-self._vocab // 16) * 16
        table = torch.zeros(max(2, 2 * old), width, dtype=torch.int16, device=self._device)
        if self.table is not None:
            table[:old] = self.table
        self.table = table
        self._free.extend(range(table.shape[0] - 1, old - 1, -1))

    def _count(self, place: int, row: SampleRow) -> None:
        assert self.table is not None, "a place was taken"
        tokens = np.array(row.token_ids, dtype=np.int64)
        prompt = np.unique(tokens[: row.num_prompt])
        output, times = np.unique(tokens[row.num_prompt :], return_counts=True)
        where = np.union1d(prompt, output)
        values = np.zeros(len(where), dtype=np.int64)
        values[np.searchsorted(where, output)] = np.minimum(times, MOST)
        values[np.searchsorted(where, prompt)] += PROMPT
        known = where < self._vocab
        both = torch.from_numpy(np.stack([where[known], values[known]]))
        if self._device.type == "cuda":
            both = both.pin_memory().to(self._device, non_blocking=True)
        line = self.table[place]
        line.zero_()
        line.index_copy_(0, both[0], both[1].to(torch.int16))

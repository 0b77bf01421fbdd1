"""Sampling parameters of rows as the device sampler takes them: a table of numbers, and single tokens' entries."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch

from qengine.engine.logit_rules import has_penalty
from qengine.engine.sampler import SampleRow, uniform
from qengine.kernels.fused.sampling import ENTRY_VALUES, PARAMETERS, Plan
from qengine.kernels.fused.sampling_kernel import CUT, DRAWN, GREEDY
from qengine.kernels.fused.sampling_ref import column
from qengine.kernels.fused.sampling_rules_kernel import ALLOWED, BAD_WORD, BANNED

FEW = 512
"""Up to this top_k, finish_cut's list is long enough but for many equal logits."""
HOTTEST = 1e30
"""Temperatures above this divide as it does: all logits are then equal, and -inf / T stays -inf."""
_UNIFORM = column("UNIFORM")
_NO_ENTRIES = np.zeros((0, ENTRY_VALUES))


@dataclass
class _Known:
    """A row's numbers that do not change from step to step, and the entries of the step before."""

    row: weakref.ref[SampleRow]
    numbers: np.ndarray
    drawn: bool
    listed: bool
    key: tuple[object, ...] | None = None
    entries: np.ndarray = field(default_factory=lambda: _NO_ENTRIES)


class RowCache:
    """Makes a step's table; remembers each SampleRow's numbers for as long as it lives."""

    columns = (column("CHANGED"), column("COUNTS"))

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._known: dict[int, _Known] = {}

    def table(self, rows: list[SampleRow], sources: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(float64 [R, 16], entries float64 [E, 3]).

        CHANGED and COUNTS are 0 where the row needs one and -1 elsewhere: who owns these tensors fills in the places.
        ALLOW of rows with a grammar is filled in there too.
        """
        table = np.empty((len(rows), PARAMETERS))
        entries: list[np.ndarray] = []
        first = 0
        for i, row in enumerate(rows):
            known = self._numbers(row)
            table[i] = known.numbers
            if known.drawn:
                table[i, _UNIFORM] = uniform(row.seed, row.index, row.num_output)
            if known.listed:
                own = self._entries(row, known)
                table[i, column("FIRST")], table[i, column("ENTRIES")] = first, len(own)
                table[i, column("BAD")] = int(((own[:, 2].astype(np.int64) & BAD_WORD.value) != 0).sum())
                if len(own) or known.numbers[column("ALLOW")]:
                    table[i, column("CHANGED")] = 0
                first += len(own)
                entries.append(own)
        table[:, column("SOURCE")] = sources
        return table, np.concatenate(entries) if entries else _NO_ENTRIES

    def plan(self, table: np.ndarray, count: int) -> Plan:
        """The launches that a table of `count` rows needs, without its rules and logprobs."""
        kinds = table[:, column("KIND")]
        cut = kinds == CUT.value
        top_k = table[:, column("TOP_K")]
        return Plan(
            rows=count,
            plain=bool((~cut).any()),
            draws=bool((kinds != GREEDY.value).any()),
            cuts=bool(cut.any()),
            wide=bool((cut & ((top_k == 0) | (top_k > FEW))).any()),
            counted=bool((table[:, column("COUNTS")] >= 0).any()),
        )

    def _numbers(self, row: SampleRow) -> _Known:
        known = self._known.get(id(row))
        if known is None or known.row() is not row:
            where, table = id(row), self._known
            gone = weakref.ref(row, lambda ref: table.pop(where) if _is(table.get(where), ref) else None)
            known = self._known[where] = _Known(gone, self._fixed(row), not row.params.greedy, _lists_tokens(row))
        return known

    def _fixed(self, row: SampleRow) -> np.ndarray:
        p = row.params
        numbers = np.zeros(PARAMETERS)
        top_k = p.top_k if 0 < p.top_k < self._vocab else 0
        cuts = top_k > 0 or p.top_p < 1 or p.min_p > 0
        numbers[column("KIND")] = GREEDY.value if p.greedy else CUT.value if cuts else DRAWN.value
        numbers[column("TEMPERATURE")] = 1.0 if p.greedy else np.float32(min(p.temperature, HOTTEST))
        numbers[column("TOP_K")] = top_k
        numbers[column("TOP_P")] = p.top_p if p.top_p < 1 else 2.0
        numbers[column("LOG_MIN_P")] = float(torch.tensor(p.min_p, dtype=torch.float32).log())
        numbers[column("REPETITION")] = p.repetition_penalty
        numbers[column("PRESENCE")] = p.presence_penalty
        numbers[column("FREQUENCY")] = p.frequency_penalty
        numbers[column("ALLOW")] = p.allowed_token_ids is not None and row.matcher is None
        numbers[column("CHANGED")] = -1
        numbers[column("COUNTS")] = 0 if has_penalty(row) else -1
        return numbers

    def _entries(self, row: SampleRow, known: _Known) -> np.ndarray:
        """float64 [E, 3], one entry a token: token, bias, bits."""
        bad = row.completing_words() if row.matcher is None else ()
        held = row.num_output < row.params.min_tokens and row.matcher is None
        key = (bad, held)
        if known.key != key:
            known.key, known.entries = key, self._merged(row, bad, row.banned_ids if held else ())
        return known.entries

    def _merged(self, row: SampleRow, bad: tuple[int, ...], banned: tuple[int, ...]) -> np.ndarray:
        bits: dict[int, int] = {}
        for tokens, bit in (
            (row.params.allowed_token_ids or () if row.matcher is None else (), ALLOWED.value),
            (bad, BAD_WORD.value),
            (banned, BANNED.value),
            (row.params.logit_bias or (), 0),
        ):
            for token in tokens:
                bits[token] = bits.get(token, 0) | bit
        bias = row.params.logit_bias or {}
        merged = [(t, bias.get(t, 0.0), b) for t, b in bits.items() if t < self._vocab]
        return np.array(merged, dtype=np.float64) if merged else _NO_ENTRIES


def _lists_tokens(row: SampleRow) -> bool:
    """True if single tokens may be banned, allowed or biased; a row with a grammar has all bans in its mask."""
    p = row.params
    if row.matcher is not None:
        return bool(p.logit_bias)
    return bool(row.bad_words or row.banned_ids or p.logit_bias or p.allowed_token_ids is not None)


def _is(known: _Known | None, ref: weakref.ref[SampleRow]) -> bool:
    return known is not None and known.row is ref

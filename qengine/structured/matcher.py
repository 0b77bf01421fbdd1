"""One sequence's place in its language: what may follow its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qengine.structured.vocabulary import import_xgrammar

BITS = 32
"""Tokens a word of a mask."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // BITS)


class TokenMatcher:
    """Follows the output of one sequence; the state is a function of its tokens alone.

    compiled: xgrammar's CompiledGrammar, shared. stop_ids: tokens that end a complete text.
    """

    def __init__(self, compiled: Any, stop_ids: Sequence[int]) -> None:
        self._matcher = import_xgrammar().GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self.stop_ids = tuple(stop_ids)
        self._count = 0
        self._lost = False

    @property
    def ended(self) -> bool:
        """True if the text is complete and a stop token has ended it."""
        return bool(self._matcher.is_terminated())

    @property
    def free(self) -> bool:
        """True if any token may follow: the text has ended, or (a defect) has left the language."""
        return self._lost or self.ended

    def follow(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Bring the state to the output `token_ids[start:]`, of which the beginning is known already.

        Ids below 0 stand for tokens that are being sampled, and end it.
        """
        if len(token_ids) - start < self._count:
            self._matcher.reset()
            self._count, self._lost = 0, False
        for at in range(start + self._count, len(token_ids)):
            token = token_ids[at]
            if token < 0:
                return
            self._count += 1
            if not self.free:
                self._lost = not self._matcher.accept_token(token)

    def fill(self, line: np.ndarray) -> None:
        """Write which tokens may follow: line int32 [W], bit t % 32 of word t // 32 is token t's."""
        if self.free:
            line.fill(-1)
        else:
            self._matcher.fill_next_token_bitmask(line[None], 0)


def has_tokens(words: np.ndarray, token_ids: Sequence[int]) -> list[bool]:
    """Whether each token's bit is set in a mask int32 [W]."""
    return [bool((int(words[token // BITS]) >> (token % BITS)) & 1) for token in token_ids]


def words_of(token_ids: Sequence[int], width: int) -> np.ndarray:
    """int32 [width]: the mask in which these tokens' bits are set. Ids beyond it are left out."""
    ids = np.asarray(token_ids, dtype=np.int64)
    ids = ids[ids < width * BITS]
    words = np.zeros(width, dtype=np.uint32)
    np.bitwise_or.at(words, ids // BITS, np.uint32(1) << (ids % BITS).astype(np.uint32))
    return words.view(np.int32)

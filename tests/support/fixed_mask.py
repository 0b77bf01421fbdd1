"""A matcher whose mask is given, for samplers: no grammar, no xgrammar."""

from __future__ import annotations

import torch

from qengine.structured.matcher import mask_words, words_of


class FixedMask:
    """Allows the same tokens at each step. seen: the outputs it was told."""

    stop_ids = ()
    ended = False

    def __init__(self, token_ids, vocab):
        self.words = words_of(sorted(token_ids), mask_words(vocab))
        self.seen = []

    def follow(self, token_ids, start=0):
        assert -1 not in token_ids, "a mask is asked for before the tokens are known"
        self.seen.append(list(token_ids[start:]))

    def fill(self, line):
        line[:] = self.words


def random_mask(vocab, share, generator):
    """A FixedMask with about this share of the tokens, at least one."""
    ids = (torch.rand(vocab, generator=generator) < share).nonzero()[:, 0].tolist()
    return FixedMask(ids or [vocab // 2], vocab)


def with_mask(row, mask):
    """The row, limited."""
    row.attach(mask)
    return row

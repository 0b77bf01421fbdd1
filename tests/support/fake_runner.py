"""A runner without tensors that proves where tokens come from: it keeps its cache in a dict, read by block table.

The "model": the next token is a hash of all tokens before it, as read back from the cache. A wrong slot, a block given
away too early, a missed copy or a stale prefix changes what is read and therefore the tokens; a position that was never
written is an error.
"""

from __future__ import annotations

import hashlib

from qengine.engine.block_manager import BlockManager
from qengine.engine.engine import Engine
from qengine.engine.limits import Limits
from qengine.engine.sampler import Samples
from qengine.engine.scheduler import Scheduler
from qengine.engine.step import StepResult

VOCAB = 50


def next_token(context, vocab=VOCAB):
    digest = hashlib.sha256(bytes(str(list(context)), "ascii")).digest()
    return int.from_bytes(digest[:4], "little") % vocab


def expected(prompt, count, vocab=VOCAB, eos=()):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    def __init__(self, block_size, vocab=VOCAB):
        self.block_size = block_size
        self.vocab = vocab
        self.cache = {}
        self.steps = []
        self.copies = 0
        self.nan_after = None

    def slot(self, table, position):
        return table[position // self.block_size], position % self.block_size

    def run(self, items, copies):
        old = dict(self.cache)
        for source, target in copies:
            for offset in range(self.block_size):
                if (source, offset) in old:
                    self.cache[target, offset] = old[source, offset]
        self.copies += len(copies)
        written = set()
        for item in items:
            for position in range(item.start, item.end):
                slot = self.slot(item.block_table, position)
                assert slot not in written, f"two sequences write slot {slot}"
                written.add(slot)
                self.cache[slot] = (position, item.token_ids[position])
        tokens = []
        for item in items:
            read = [self.cache[self.slot(item.block_table, p)] for p in range(item.end)]
            assert [p for p, _ in read] == list(range(item.end)), "a cached block is at another position"
            assert [t for _, t in read] == item.token_ids[: item.end], "the cache holds another sequence's tokens"
            for row in item.rows:
                assert row.token_ids[: item.end] == item.token_ids[: item.end]
                tokens.append(next_token([t for _, t in read], self.vocab))
        self.steps.append([(item.seq_id, item.end - item.start) for item in items])
        valid = [self.nan_after is None or len(self.steps) <= self.nan_after] * len(tokens)
        return StepResult(Samples(tokens, valid, [None] * len(tokens)))


def fake_engine(
    *,
    num_blocks=64,
    block_size=4,
    max_num_seqs=16,
    max_num_batched_tokens=32,
    max_model_len=64,
    prefix_caching=True,
    eos=(),
    vocab=VOCAB,
    bos=None,
):
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
    limits = Limits(
        vocab_size=vocab,
        sample_vocab=vocab,
        max_model_len=max_model_len,
        pool_tokens=num_blocks * block_size,
        eos_ids=frozenset(eos),
        bos_id=bos,
    )
    scheduler = Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_len=limits.max_len,
    )
    return Engine(FakeRunner(block_size, vocab), scheduler, limits)


def run_all(engine, limit=10_000):
    for _ in range(limit):
        if not engine.has_unfinished():
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")

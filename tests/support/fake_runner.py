"""A runner without tensors that proves where tokens come from: its blocks say what they hold, and are read by table.

The "model": the next token is a hash of all tokens before it, as read back from the cache. Each place of a block holds
a position, a token and a hash of all tokens up to it, as real keys and values depend on them all. A wrong slot, a block
given away too early, a missed, late or misplaced copy or a stale prefix changes what is read; a position that was never
written is an error. Copies to and from CPU memory go through the real SwapSpace and a device that reorders what it may.
"""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import replace

from fake_device import FakeDevice

from qengine.engine.block_manager import BlockManager
from qengine.engine.engine import Engine
from qengine.engine.limits import Limits
from qengine.engine.sampler import Samples
from qengine.engine.scheduler import Scheduler
from qengine.engine.sequence import UNKNOWN
from qengine.engine.step import NO_SWAP, Done, StepResult
from qengine.engine.swap import SwapSpace
from qengine.engine.swap_policy import SwapPolicy

VOCAB = 50


def next_token(context, vocab=VOCAB, allowed=None):
    """allowed: the tokens to choose from, in order; None is all."""
    digest = hashlib.sha256(bytes(str(list(context)), "ascii")).digest()
    number = int.from_bytes(digest[:4], "little")
    return number % vocab if allowed is None else allowed[number % len(allowed)]


def expected(prompt, count, vocab=VOCAB, eos=()):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def histories(tokens):
    """For each position a number that depends on it and on all tokens up to it."""
    found, last = [], 0
    for position, token in enumerate(tokens):
        last = hash((last, position, token))
        found.append(last)
    return found


class FakeRunner:
    """overlaps: steps run when their results are asked for, so that the next one is launched before. later: how many
    of them were not drawn yet when they were launched.

    cold: things that `warm_up` has to do. fail_at: numbers of the steps (from 1) that fail: while they are launched, or
    when their results are asked for.
    """

    def __init__(self, block_size, vocab=VOCAB, num_blocks=4096, num_cpu_blocks=0, seed=0, overlaps=False):
        self.block_size = block_size
        self.vocab = vocab
        self.overlaps = overlaps
        self.rng = random.Random(seed)
        self.device = FakeDevice(num_blocks, num_cpu_blocks, self.rng)
        self.device.blocks = [{} for _ in range(num_blocks)]
        self.space = SwapSpace(self.device)
        self.sampled = {}
        self.later = 0
        self.steps = []
        self.copies = 0
        self.nan_after = None
        self.cold = 0
        self.calls = 0
        self.fail_at = ()

    def slot(self, table, position):
        return table[position // self.block_size], position % self.block_size

    def run(self, items, copies, swap=NO_SWAP):
        return self.launch(items, copies, swap).result()

    def launch(self, items, copies, swap=NO_SWAP, *, later=False):
        self.calls += 1
        number = self.calls
        self._fail(number)
        self.space.begin_step(swap)
        self._fail(number)
        copies = list(copies)
        self.device.compute("copies", lambda: self._copy(copies))
        # Books change while a step is under way: what it needs is what they said when it was launched.
        rows = [row for item in items for row in item.rows]
        items = [replace(i, block_table=list(i.block_table), token_ids=i.token_ids[: i.end]) for i in items]
        masks, tokens = None if later else masks_of(rows), []
        self.later += later
        self.copies += len(copies)
        self.steps.append([(item.seq_id, item.end - item.start) for item in items])
        finite = self.nan_after is None or len(self.steps) <= self.nan_after
        step = self.device.compute("step", lambda: self._compute(items, None if later else (rows, masks, tokens)))
        self._fail(number)

        def result():
            self._fail(number)
            self.device.finish(step)
            self._fail(number, last=True)
            return StepResult(Samples(tokens, [finite] * len(tokens), [None] * len(tokens)))

        def draw():
            nonlocal masks, step
            assert later, "a step is drawn twice"
            assert masks is None, "a step is drawn twice"
            self._fail(number)
            masks = masks_of(rows)
            step = self.device.compute("draw", lambda: self._draw(rows, masks, tokens))

        flight = Flight(result, draw)
        return flight if self.overlaps else Done(flight.result())

    def warm_up(self, stop=lambda: False):
        while self.cold and not stop():
            self.cold -= 1
            time.sleep(0.001)
        return not self.cold

    def close(self):
        self.space.close()

    def _fail(self, number, last=False):
        if number in self.fail_at and (last or self.rng.random() < 0.2):
            raise MemoryError("this step was to fail")

    def _copy(self, copies):
        blocks = self.device.blocks
        sources = [dict(blocks[source]) for source, _ in copies]
        for (_, target), content in zip(copies, sources, strict=True):
            blocks[target] = content

    def _compute(self, items, drawn):
        blocks, written, contexts = self.device.blocks, set(), {}
        for item in items:
            if item.token_ids[-1] == UNKNOWN:
                item.token_ids[-1] = self.sampled[id(item.rows[0])]  # by the step before; a KeyError is a defect
            assert UNKNOWN not in item.token_ids, "a token that nobody knows is computed"
        for item in items:
            known = histories(item.token_ids)
            for position in range(item.start, item.end):
                block, offset = self.slot(item.block_table, position)
                assert (block, offset) not in written, f"two sequences write slot {offset} of block {block}"
                written.add((block, offset))
                blocks[block][offset] = (position, item.token_ids[position], known[position])
        for item in items:
            read = []
            for position in range(item.end):
                block, offset = self.slot(item.block_table, position)
                assert offset in blocks[block], f"position {position} of sequence {item.seq_id} was never written"
                read.append(blocks[block][offset])
            assert [p for p, _, _ in read] == list(range(item.end)), "a cached block is at another position"
            assert [t for _, t, _ in read] == item.token_ids, "the cache holds another sequence's tokens"
            assert [h for _, _, h in read] == histories(item.token_ids), "a block of another history"
            contexts |= {id(row): [t for _, t, _ in read] for row in item.rows}
        self.contexts = contexts
        if drawn is not None:
            self._draw(*drawn)

    def _draw(self, rows, masks, tokens):
        for row, mask in zip(rows, masks, strict=True):
            tokens.append(next_token(self.contexts[id(row)], self.vocab, mask))
        self.sampled = {id(row): token for row, token in zip(rows, tokens, strict=True)}


def masks_of(rows):
    """What rows with a grammar may sample, by the tokens that the host knows now."""
    return [None if row.matcher is None else row.matcher.allowed(row.token_ids, row.num_prompt) for row in rows]


class Flight:
    """A step under way."""

    def __init__(self, result, draw):
        self.result = result
        self.draw = draw


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
    num_cpu_blocks=0,
    threshold=0.0,
    prefill_rate=1000.0,
    copy_rate=1e6,
    late_seconds=0.0,
    policy="fcfs",
    ageing=60.0,
    overlaps=False,
    seed=0,
):
    """An engine over a FakeRunner. A block's copy takes 1 ms at the default rates, a token's computation too."""
    swap = SwapPolicy(FakeDevice.block_bytes, block_size, copy_rate, copy_rate, prefill_rate, threshold, late_seconds)
    blocks = BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=prefix_caching,
        num_cpu_blocks=num_cpu_blocks,
        policy=swap if num_cpu_blocks else None,
    )
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
        policy=policy,
        ageing=ageing,
    )
    return Engine(FakeRunner(block_size, vocab, num_blocks, num_cpu_blocks, seed, overlaps), scheduler, limits)


def run_all(engine, limit=10_000):
    for _ in range(limit):
        if not engine.has_unfinished():
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")

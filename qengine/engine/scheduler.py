"""Which sequences the next step computes, and how many tokens of each. Plain Python: no tensor, no device.

First come, first served. A step first serves the running sequences, oldest first, then admits waiting ones while
tokens, sequences and blocks allow. When blocks run out, the youngest running sequence is preempted: its blocks are
free again and it waits, at its old place in the queue, to be computed anew (its tokens are kept). The oldest
sequence is thus never disturbed, and any one sequence alone fits the pool (`max_len`), so every step makes progress
and every sequence becomes the oldest in time.

The n sequences of a request compute their prompt once: when the first has, those that wait take part in its blocks
(`Chunk.forks`) and the sampler draws a token for each from the same logits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from qengine.engine.block_manager import BlockManager, Copy
from qengine.engine.sequence import Sequence, Status


@dataclass
class Chunk:
    """`length` tokens of `seq` from position `start` on. forks: siblings that share its prompt from now on."""

    seq: Sequence
    start: int
    length: int
    forks: list[Sequence] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the sequence's last token, so that a next token follows from it."""
        return self.end == len(self.seq.token_ids)


@dataclass
class Plan:
    """One step: chunks to compute, and block copies to make before. preempted: sequences that lost their blocks."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Owns the queues. `max_len`: most tokens of one sequence; the pool must hold them."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_len: int) -> None:
        need = blocks.blocks_for(max_len)
        assert need <= blocks.num_blocks, f"{max_len} tokens need {need} blocks, there are {blocks.num_blocks}"
        self.blocks = blocks
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_len = max_len
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        assert len(seq.token_ids) <= self.max_len, f"{len(seq.token_ids)} tokens are more than max_len {self.max_len}"
        insort(self.waiting, seq)

    def has_unfinished(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan:
        """Choose the next step's work and give it its blocks. To be followed by `commit` once it is computed."""
        plan = Plan(budget=self.max_num_batched_tokens)
        self._schedule_running(plan)
        for chunk in plan.chunks:
            self._fork(chunk)
        if not plan.preempted:
            self._admit(plan)
        assert plan.chunks or not self.has_unfinished(), "nothing could be scheduled although sequences are unfinished"
        return plan

    def commit(self, plan: Plan) -> None:
        """Note that the plan's tokens are in the cache. Call before sampled tokens are appended."""
        for chunk in plan.chunks:
            for seq in (chunk.seq, *chunk.forks):
                seq.num_computed = chunk.end
                self.blocks.commit(seq.id, seq.token_ids, chunk.end)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Also aborts."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.blocks.free(seq.id)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    def restart(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits, at its place in the order, to be computed anew."""
        self.blocks.free(seq.id)
        self.running.remove(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        insort(self.waiting, seq)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, statuses and block tables contradict each other. For tests."""
        self.blocks.check_integrity()
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            assert all(seq.status is status for seq in queue), f"a {status.value} queue holds another status"
            assert queue == sorted(queue), f"the {status.value} queue is out of order"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} run, {self.max_num_seqs} may"
        held = self.blocks.num_blocks - self.blocks.num_free
        assert bool(held) == bool(self.running), f"{held} blocks are in use by {len(self.running)} running sequences"
        for seq in self.running:
            have, need = len(self.blocks.table(seq.id)), self.blocks.blocks_for(seq.num_computed)
            assert have >= need, f"sequence {seq.id} has {have} blocks for {seq.num_computed} computed tokens"

    def _schedule_running(self, plan: Plan) -> None:
        """A chunk for each running sequence, oldest first; the youngest are preempted where blocks run out."""
        index = 0
        while index < len(self.running) and plan.budget > 0:
            seq = self.running[index]
            end = seq.num_computed + min(seq.num_pending, plan.budget)
            copies = self.blocks.reserve(seq.id, seq.num_computed, end)
            while copies is None and self.running[-1] is not seq:
                self._preempt(self.running[-1], plan)
                copies = self.blocks.reserve(seq.id, seq.num_computed, end)
            if copies is None:
                assert index > 0, f"sequence {seq.id} alone does not fit {self.blocks.num_blocks} blocks"
                self._preempt(seq, plan)
                return
            self._take(plan, seq, end, copies)
            index += 1

    def _admit(self, plan: Plan) -> None:
        """Start waiting sequences in order, each with blocks for all its tokens, so that none stops half-way."""
        index = 0
        while index < len(self.waiting) and plan.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[index]
            if self._prompt_in_progress(seq):
                index += 1
                continue
            headroom = max(1, self.blocks.num_blocks // 100) if self.running else 0
            cached = self.blocks.begin(
                seq.id, seq.token_ids, salt=seq.salt, read_cache=seq.read_prefix_cache, headroom=headroom
            )
            if cached is None:
                return
            seq.num_computed = cached
            if not seq.num_output:
                seq.num_cached = cached
            self._start(seq)
            chunk = self._take(plan, seq, cached + min(seq.num_pending, plan.budget), [])
            self._fork(chunk)

    def _take(self, plan: Plan, seq: Sequence, end: int, copies: list[Copy]) -> Chunk:
        chunk = Chunk(seq, seq.num_computed, end - seq.num_computed)
        plan.chunks.append(chunk)
        plan.copies += copies
        plan.budget -= chunk.length
        return chunk

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq)

    def _fork(self, chunk: Chunk) -> None:
        """Let waiting siblings of a prompt that this chunk completes share its blocks, as far as sequences allow."""
        leader = chunk.seq
        if chunk.end != leader.num_prompt or leader.num_output:
            return
        for seq in leader.siblings:
            if seq.status is Status.WAITING and not seq.num_output and len(self.running) < self.max_num_seqs:
                self.blocks.fork(leader.id, seq.id, chunk.end)
                seq.num_cached = leader.num_cached
                self._start(seq)
                chunk.forks.append(seq)

    def _prompt_in_progress(self, seq: Sequence) -> bool:
        """True if a running sibling is about to compute the prompt that this sequence could share."""
        return not seq.num_output and any(
            other.status is Status.RUNNING and other.num_computed < other.num_prompt and not other.num_output
            for other in seq.siblings
            if other is not seq
        )

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        self.restart(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(seq)

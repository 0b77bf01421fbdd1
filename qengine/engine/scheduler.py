"""Which sequences the next step computes, and how many tokens of each. Plain Python: no tensor, no device.

Sequences have a fixed order (`Scheduler.rank`): by arrival, or by priority and arrival. A step first serves the running
ones in order, each at least one token, then admits waiting ones while tokens, sequences and blocks allow. When blocks
run out, the running sequence that is last in order is preempted: its blocks are free again and it waits, at its old
place in the queue. Its tokens are kept, and its cache is copied to CPU memory or computed anew, whichever costs less
(see block_manager.py). With priorities, a waiting sequence preempts running ones of lower priority, if that makes room.

Progress: the first in order is never preempted, any one sequence alone fits the pool (`max_len`), and every sequence
becomes the first in time: no order changes, and by `ageing` only finitely many later ones come before it. No thrashing:
nothing is admitted in a step that ran out of blocks, nor unless the running sequences can grow by some blocks
afterwards (`_headroom`); and a sequence whose blocks come back is computed at least once before it can lose them.

The n sequences of a request compute their prompt once: when the first has, those that wait take part in its blocks
(`Chunk.forks`) and the sampler draws a token for each from the same logits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from qengine.engine.block_manager import BlockManager, Copy
from qengine.engine.plan import Chunk, Plan
from qengine.engine.sequence import Sequence, Status

__all__ = ["Chunk", "Plan", "PreemptionStats", "Scheduler"]

HEADROOM_BLOCKS = 2
"""For each running sequence so many blocks are kept free when another is admitted. Of the mixed load of `qengine bench`
with 1,286 blocks, 7 % of the tokens were computed again after preemptions with one, 1 % with two; with three the cache
was emptier and the steps more."""
HEADROOM_SHARE = 16
"""At most one block in so many is kept free in all."""


@dataclass
class PreemptionStats:
    """Times a sequence gave up its blocks, by how it gets its cache back."""

    swapped: int = 0
    recomputed: int = 0


class Scheduler:
    """Owns the queues.

    max_len: most tokens of one sequence; the pool must hold them. policy: "fcfs" or "priority". ageing: seconds of
    waiting that make up for one level of priority; inf: none do.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_len: int,
        policy: str = "fcfs",
        ageing: float = 60.0,
    ) -> None:
        need = blocks.blocks_for(max_len)
        assert need <= blocks.num_blocks, f"{max_len} tokens need {need} blocks, there are {blocks.num_blocks}"
        assert policy in ("fcfs", "priority"), f"unknown scheduling policy {policy!r}"
        self.blocks = blocks
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_len = max_len
        self.policy = policy
        self.ageing = ageing
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = PreemptionStats()

    @property
    def num_preemptions(self) -> int:
        """Times a sequence gave up its blocks."""
        return self.preemptions.swapped + self.preemptions.recomputed

    def rank(self, priority: int, now: float) -> float:
        """First part of the order of a request that arrives at `now` seconds.

        That all waiting requests gain a level every `ageing` seconds leaves their order as it is, so a rank is fixed:
        a request comes before those of priority p levels higher that arrive p * ageing seconds after it, or later.
        """
        return priority + now / self.ageing if self.policy == "priority" else 0.0

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
        urgent = self._make_way(plan) if self.policy == "priority" else None
        crowded = self._schedule_running(plan)
        for chunk in plan.chunks:
            self._fork(chunk)
        if not crowded:
            self._admit(plan, urgent)
        if plan.chunks:
            self.blocks.copy_ahead(self._next_need(plan))
            plan.swap = self.blocks.take_orders()
        else:  # those whose last token is under way hold the blocks; copies that were ordered go with the next step
            stuck = self.has_unfinished() and not any(seq.is_full for seq in self.running)
            assert not stuck, "nothing could be scheduled although sequences are unfinished"
        return plan

    def advance(self, plan: Plan) -> None:
        """Note that the plan is under way: what is scheduled next comes after it. Call before tokens are appended."""
        for chunk in plan.chunks:
            chunk.seq.arriving = False
            for seq in (chunk.seq, *chunk.forks):
                seq.num_computed = chunk.end

    def commit(self, plan: Plan) -> None:
        """Note that the plan's tokens, all known by now, are in the cache, where others may find them.

        Sequences that have ended, or lost their blocks, since the plan was made are passed over.
        """
        for chunk in plan.chunks:
            for seq in (chunk.seq, *chunk.forks):
                if seq.status is Status.RUNNING and seq.num_computed >= chunk.end:
                    self.blocks.commit(seq.id, seq.token_ids, chunk.end)

    def fail(self, plan: Plan) -> None:
        """Note that the plan's step was cut short: what it should have filled is unknown and is computed anew.

        So is what waiting sequences wanted back, and no block is found by its content any more: the step, and copies
        with it, may have been anywhere in their work. Failing twice is as failing once.
        """
        self.blocks.forget_content()
        for seq in self.waiting:
            seq.status = Status.WAITING
        for seq in plan.sequences:
            if seq.status is Status.RUNNING:
                self.restart(seq)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Also aborts."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.waits:
            self.waiting.remove(seq)
        self.blocks.free(seq.id)
        seq.status = Status.FINISHED

    def restart(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits, at its place in the order, to be computed anew."""
        self.blocks.free(seq.id)
        self._stop(seq, Status.WAITING)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, statuses and block tables contradict each other. For tests."""
        self.blocks.check_integrity()
        assert all(seq.waits for seq in self.waiting), "the waiting queue holds another status"
        assert all(seq.status is Status.RUNNING for seq in self.running), "the running queue holds another status"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue), "a queue is out of order"
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} run, {self.max_num_seqs} may"
        held = self.blocks.num_blocks - self.blocks.num_free
        assert bool(held) == bool(self.running), f"{held} blocks are in use by {len(self.running)} running sequences"
        for seq in self.running:
            have, need = len(self.blocks.table(seq.id)), self.blocks.blocks_for(seq.num_computed)
            assert have >= need, f"sequence {seq.id} has {have} blocks for {seq.num_computed} computed tokens"
        for seq in self.waiting:
            swapped = self.blocks.is_swapped(seq.id)
            assert swapped == (seq.status is Status.SWAPPED), f"sequence {seq.id} is {seq.status}, swapped: {swapped}"
            assert not seq.arriving, f"sequence {seq.id} waits, and its blocks arrive"

    def _make_way(self, plan: Plan) -> Sequence | None:
        """Preempt running sequences of lower priority, last in order first, if that lets the first waiting one start.

        Returns the waiting one that room was made for.
        """
        if not self.waiting or self._prompt_in_progress(self.waiting[0]):
            return None
        seq, chosen = self.waiting[0], list[Sequence]()
        victims = [other for other in self.running if other.priority > seq.priority and seq < other]
        victims = [other for other in victims if not (other.arriving or other.is_full)]
        while not self._could_start(seq, chosen):
            if not victims:
                return None
            chosen.append(victims.pop())
        for other in chosen:
            self._preempt(other, plan)
        return seq if chosen else None

    def _could_start(self, seq: Sequence, chosen: list[Sequence]) -> bool:
        left = len(self.running) - len(chosen)
        return left < self.max_num_seqs and self.blocks.fits(
            seq.id,
            seq.token_ids,
            salt=seq.salt,
            read_cache=seq.read_prefix_cache,
            headroom=self._headroom(left),
            without=[other.id for other in chosen],
        )

    def _schedule_running(self, plan: Plan) -> bool:
        """A chunk for each running sequence, in order; the last are preempted where blocks run out: then True.

        A long prompt leaves a token for each sequence after it. Where the blocks are held by sequences that arrive in
        this step, or end with the one under way, nobody is preempted for them: who has none waits for one step.
        """
        todo, crowded = [seq for seq in self.running if not seq.is_full], False
        ending = len(todo) < len(self.running)
        while todo:
            seq = todo.pop(0)
            end = seq.num_computed + min(seq.num_pending, plan.budget - len(todo))
            copies = self.blocks.reserve(seq.id, seq.num_computed, end)
            while copies is None:
                crowded = True
                victim = next((other for other in reversed(todo) if not other.arriving), None)
                if victim is None:
                    break
                todo.remove(victim)
                self._preempt(victim, plan)
                copies = self.blocks.reserve(seq.id, seq.num_computed, end)
            if copies is not None:
                self._take(plan, seq, end, copies)
            elif not (todo or ending):
                assert plan.chunks, f"sequence {seq.id} alone does not fit {self.blocks.num_blocks} blocks"
                self._preempt(seq, plan)
        return crowded

    def _admit(self, plan: Plan, urgent: Sequence | None) -> None:
        """Start waiting sequences in order, each with blocks for all its tokens, so that none stops half-way.

        urgent: room was made for this one, for the running ones to grow too.
        """
        index = 0
        while index < len(self.waiting) and plan.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[index]
            if seq in plan.preempted:
                return
            if self._prompt_in_progress(seq):
                index += 1
                continue
            cached = self.blocks.begin(
                seq.id,
                seq.token_ids,
                salt=seq.salt,
                read_cache=seq.read_prefix_cache,
                headroom=0 if seq is urgent else self._headroom(len(self.running)),
                count=not seq.num_preemptions,
                overlap=bool(plan.chunks),
            )
            if cached is None:
                return
            seq.num_computed = cached
            if not seq.num_output and not seq.num_preemptions:
                seq.num_cached = cached
            self._start(seq)
            if self.blocks.is_late(seq.id):
                seq.arriving = True
                plan.arriving.append(seq)
            else:
                self._fork(self._take(plan, seq, cached + min(seq.num_pending, plan.budget), []))

    def _headroom(self, running: int) -> int:
        """Blocks that stay free when a sequence is admitted beside so many, for them to grow before one must go."""
        return min(HEADROOM_BLOCKS * running, max(1, self.blocks.num_blocks // HEADROOM_SHARE))

    def _next_need(self, plan: Plan) -> int:
        """About how many blocks the next step takes: for tokens that start a block, and for who waits first."""
        growing = sum(chunk.samples and chunk.end % self.blocks.block_size == 0 for chunk in plan.chunks)
        return growing + (self.blocks.blocks_for(len(self.waiting[0].token_ids)) if self.waiting else 0)

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

    def _stop(self, seq: Sequence, status: Status) -> None:
        self.running.remove(seq)
        seq.status = status
        seq.num_computed = 0
        seq.arriving = False
        insort(self.waiting, seq)

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
        """Take a running sequence's blocks; it waits, at its place in the order, to go on."""
        kept = self.blocks.preempt(seq.id, seq.token_ids, seq.num_computed)
        self._stop(seq, Status.SWAPPED if kept else Status.WAITING)
        seq.num_preemptions += 1
        if kept:
            self.preemptions.swapped += 1
        else:
            self.preemptions.recomputed += 1
        plan.preempted.append(seq)

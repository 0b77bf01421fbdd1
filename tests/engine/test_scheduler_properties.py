"""Random histories of requests through scheduler, block manager, both tiers and the copies between them.

Whatever happens, each request gets its own tokens (the fake runner reads them back from blocks that say what they
hold), the books agree after every step, copies are ordered as they must be, everybody comes to an end and every block
is free then.
"""

import contextlib
import math

import pytest
from fake_runner import expected, fake_engine, run_all
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qengine.sampling_params import SamplingParams

MAX_LEN = 24
EOS = (0, 1)

setups = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 16),
        "block_size": st.sampled_from([1, 2, 3, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 16),
        "prefix_caching": st.booleans(),
        "num_cpu_blocks": st.sampled_from([0, 1, 2, 4, 8, 16, 40]),
        "threshold": st.sampled_from([0.0, 0.0, 1.0, 2.5, math.inf]),
        "late_seconds": st.sampled_from([0.0, 0.0025, math.inf]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "ageing": st.sampled_from([1e-7, 60.0, math.inf]),
        "overlaps": st.booleans(),
        "headroom": st.booleans(),
        "seed": st.integers(0, 2**32),
    }
)


def watch(scheduler):
    """Wrap `schedule`: what must hold for every plan."""
    inner, computed = scheduler.schedule, set()

    def schedule():
        first = min(scheduler.running, default=None)
        running, arriving = list(scheduler.running), [seq for seq in scheduler.running if seq.arriving]
        plan = inner()
        orders, chunks = plan.swap, [chunk.seq for chunk in plan.chunks]
        assert plan.num_tokens + plan.budget == scheduler.max_num_batched_tokens
        assert plan.budget >= 0, "more tokens than max_num_batched_tokens"
        assert len(chunks) == len(set(chunks)), "a sequence has two chunks"
        urgent = scheduler.waiting + scheduler.running
        assert first not in plan.preempted or any(seq.priority < first.priority for seq in urgent), "first in order"
        assert all(seq in chunks for seq in arriving), "a sequence whose blocks came back is not computed"
        assert not set(plan.preempted) & {*chunks, *plan.arriving}, "preempted and computed in one step"
        assert all(seq in computed for seq in plan.preempted), "preempted before it was computed since it was admitted"
        started = [seq for seq in scheduler.running if seq not in running]
        computed.difference_update(started, plan.preempted)
        computed.update(seq for chunk in plan.chunks for seq in (chunk.seq, *chunk.forks))
        filled = [block for _, block in (*orders.in_, *orders.late_in)] + [block for _, block in plan.copies]
        assert len(filled) == len(set(filled)), "a block of the device is filled twice"
        saved = [block for _, block in (*orders.out, *orders.late_out)]
        assert len(saved) == len(set(saved)), "a block of CPU memory is filled twice"
        late = {block for block, _ in orders.late_out} | {block for _, block in orders.late_in}
        for chunk in plan.chunks:
            table, size = scheduler.blocks.table(chunk.seq.id), scheduler.blocks.block_size
            used = table[chunk.start // size : -(-chunk.end // size)]
            assert not late & set(used), "a late copy's block is written in the step"
        return plan

    scheduler.schedule = schedule


class Histories(RuleBasedStateMachine):
    @initialize(setup=setups)
    def start(self, setup):
        careful = setup.pop("headroom")
        self.engine = fake_engine(**setup, max_model_len=MAX_LEN, eos=EOS)
        if not careful:  # blocks run out far more often
            self.engine.scheduler._headroom = lambda running: 0
        watch(self.engine.scheduler)
        self.longest = self.engine.limits.max_len
        self.requests, self.aborted = [], set()

    def greedy(self, count, **more):
        return SamplingParams(temperature=0, max_tokens=count, **more)

    @precondition(lambda self: self.longest > 1)
    @rule(
        rng=st.randoms(use_true_random=False),
        count=st.one_of(st.none(), st.integers(1, 12)),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "x"]),
        priority=st.sampled_from([0, 0, -3, 1, 7]),
    )
    def add(self, rng, count, n, ignore_eos, salt, priority):
        prompt = [rng.randint(2, 3) for _ in range(rng.randint(1, self.longest - 1))]
        if self.requests and rng.random() < 0.5:  # goes on where another one is, or is its beginning
            seq = rng.choice(self.requests).outputs[0].seq
            known = seq.token_ids[: len(seq.token_ids) - seq.num_unknown]
            prompt = (known[: rng.randint(1, len(known))] + prompt)[: rng.randint(1, self.longest - 1)]
        if self.engine.scheduler.policy == "fcfs":
            priority = 0
        params = self.greedy(count, n=n, ignore_eos=ignore_eos)
        self.requests.append(self.engine.add_request(prompt, params, cache_salt=salt, priority=priority))

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if not request.finished:
            self.aborted.add(request)
        self.engine.abort(request)
        self.engine.check_integrity()

    @rule()
    def failing_step(self):
        if not self.engine.has_unfinished():
            return
        runner = self.engine._runner
        runner.fail_at = (runner.calls + 1,)
        for _ in range(2):  # it may fail when it is launched, or a step later, when its result is asked for
            with contextlib.suppress(MemoryError):
                self.engine.step()
            self.engine.check_integrity()
        runner.fail_at = ()

    @invariant()
    def books_agree(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        run_all(engine)
        assert engine.blocks.num_free == engine.blocks.num_blocks
        stats = engine.stats()
        assert stats.gpu_blocks_used == stats.cpu_blocks_used == stats.swapped == 0
        assert stats.blocks_out + stats.blocks_in >= engine._runner.device.copied
        for request in self.requests:
            if request in self.aborted:
                continue
            prompt, params = request.prompt_token_ids, request.params
            count = min(params.max_tokens or MAX_LEN, self.longest - len(prompt))
            want = expected(prompt, count, eos=() if params.ignore_eos else EOS)
            assert [output.token_ids for output in request.result().outputs] == [want] * params.n


def check(examples, steps):
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


def test_random_histories():
    check(examples=400, steps=25)


@pytest.mark.slow
def test_many_random_histories():
    check(examples=8000, steps=50)

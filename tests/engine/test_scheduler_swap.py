"""Preemption by swap and by recomputation, priorities, fairness and progress, with the engine around the scheduler."""

import itertools
import math
import random

import pytest
from fake_runner import expected, fake_engine, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.engine.sequence import Status
from qengine.errors import RequestError
from qengine.sampling_params import SamplingParams

KINDS = {
    "swap": {"num_cpu_blocks": 64, "threshold": 0.0},
    "recompute": {"num_cpu_blocks": 0},
    "never pays": {"num_cpu_blocks": 64, "threshold": 1e9},
    "little room": {"num_cpu_blocks": 5, "threshold": 0.0},
    "not late": {"num_cpu_blocks": 64, "threshold": 0.0, "late_seconds": math.inf},
}


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def tokens_of(request):
    return [output.token_ids for output in request.result().outputs]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_pool_gives_the_same_tokens_once_each(kind, caching, overlaps):
    pool = {"num_blocks": 20, "block_size": 4, "max_model_len": 48, "prefix_caching": caching, "overlaps": overlaps}
    engine = fake_engine(**pool, **KINDS[kind])
    requests = [engine.add_request([i, i + 1, i + 2], greedy(30), streamed=True) for i in range(12)]
    run_all(engine)
    for i, request in enumerate(requests):
        want = expected([i, i + 1, i + 2], 30)
        assert tokens_of(request) == [want]
        assert [token for delta in request.take_deltas() for token in delta.token_ids] == want
    stats = engine.stats()
    assert engine.scheduler.num_preemptions > 3
    assert (stats.preemptions_swapped > 0) == (kind in ("swap", "little room", "not late"))
    assert (stats.preemptions_recomputed > 0) == (kind in ("recompute", "never pays", "little room"))
    assert stats.gpu_blocks_used == stats.cpu_blocks_used == 0
    if kind in ("swap", "not late"):
        assert stats.blocks_in > 0
        assert stats.bytes_in == 1000 * stats.blocks_in
        computed = sum(count for step in engine._runner.steps for _, count in step)
        assert computed == 12 * (3 + 30 - 1), "nothing was computed twice"
    if kind in ("recompute", "never pays"):
        assert stats.blocks_out == stats.blocks_in == 0


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_n_8_in_a_pool_for_one(kind):
    engine = fake_engine(num_blocks=6, block_size=4, max_model_len=24, **KINDS[kind])
    request = engine.add_request(list(range(9)), greedy(14, n=8))
    run_all(engine)
    assert tokens_of(request) == [expected(range(9), 14)] * 8
    assert engine.scheduler.num_preemptions > 0


def test_long_copies_overlap_a_step_and_short_ones_do_not():
    for late, joins in ((0.0, True), (math.inf, False)):
        engine = fake_engine(num_blocks=12, block_size=2, max_model_len=20, num_cpu_blocks=19, late_seconds=late)
        for i, count in enumerate((8, 16, 16)):
            engine.add_request([i, 7], greedy(count))
        plans, inner = [], engine.scheduler.schedule
        engine.scheduler.schedule = lambda plans=plans, inner=inner: plans.append(inner()) or plans[-1]
        run_all(engine)
        assert any(plan.arriving for plan in plans) is joins
        assert any(plan.swap.late_in for plan in plans) is joins
        assert joins or any(plan.swap.in_ for plan in plans)
        for plan, after in itertools.pairwise(plans):
            assert not {seq.id for seq in plan.arriving} & {chunk.seq.id for chunk in plan.chunks}
            assert {seq.id for seq in plan.arriving} <= {chunk.seq.id for chunk in after.chunks}


def test_copies_back_are_not_late_where_nothing_else_runs():
    engine = fake_engine(num_blocks=4, block_size=2, max_model_len=8, num_cpu_blocks=9)
    first = engine.add_request([1, 2, 3, 4, 5], greedy(2))
    run_all(engine)
    engine.add_request([9, 8, 7, 6, 5], greedy(2))
    run_all(engine)
    again = engine.add_request([1, 2, 3, 4, 5], greedy(2))
    plan = engine.scheduler.schedule()
    assert len(plan.swap.in_) > 0
    assert not plan.swap.late_in
    assert [chunk.seq for chunk in plan.chunks] == [again.outputs[0].seq]
    assert first.result().num_cached_tokens == 0
    assert again.result().num_cached_tokens == 4
    assert engine.stats().cpu_hit_tokens > 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_swapped_sequence_goes_on_where_it_was(overlaps):
    pool = {"num_blocks": 8, "block_size": 2, "max_model_len": 16, "num_cpu_blocks": 20, "prefix_caching": False}
    engine = fake_engine(**pool, overlaps=overlaps)
    old, young = (engine.add_request([i, 2, 3], greedy(12)) for i in range(2))
    while young.outputs[0].seq.status is not Status.SWAPPED:
        engine.step()
    have = len(young.outputs[0].seq.token_ids)
    assert young.outputs[0].seq.num_computed == 0
    run_all(engine)
    chunks = [count for step in engine._runner.steps for seq, count in step if seq == young.outputs[0].seq.id]
    assert chunks == [3] + [1] * 11, f"after {have} tokens it was computed anew"
    assert tokens_of(old) + tokens_of(young) == [expected([i, 2, 3], 12) for i in range(2)]
    assert young.result().metrics.num_preemptions == 1


def test_abort_while_swapped_and_while_blocks_arrive():
    for when in ("swapped", "arriving"):
        engine = fake_engine(num_blocks=12, block_size=2, max_model_len=20, num_cpu_blocks=20)
        old, other, young = (engine.add_request([i, 7], greedy(count)) for i, count in enumerate((8, 16, 16)))
        seq = young.outputs[0].seq
        for _ in range(100):
            if (seq.status is Status.SWAPPED) if when == "swapped" else seq.arriving:
                break
            engine.step()
        else:
            raise AssertionError(f"it was never {when}")
        engine.abort(young)
        engine.check_integrity()
        assert engine.stats().swapped == 0
        run_all(engine)
        assert tokens_of(old) + tokens_of(other) == [expected([0, 7], 8), expected([1, 7], 16)]
        assert engine.stats().cpu_blocks_used == 0
        assert engine.blocks.num_free == 12


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_whatever_the_cpu_tier_holds():
    engine = fake_engine(num_blocks=4, block_size=4, max_model_len=64, num_cpu_blocks=1000)
    with pytest.raises(RequestError, match=r"20 tokens.*KV cache holds 16"):
        engine.add_request(list(range(20)), greedy(3))
    after = engine.add_request([2], greedy(3))
    run_all(engine)
    assert tokens_of(after) == [expected([2], 3)]


def test_long_prompt_leaves_a_token_to_every_running_sequence():
    engine = fake_engine(max_num_batched_tokens=8, policy="priority", ageing=math.inf)
    others = [engine.add_request([i], greedy(20), priority=5) for i in range(3)]
    engine.step()
    long = engine.add_request(list(range(30)), greedy(2), priority=-5)
    run_all(engine)
    assert [len(step) for step in engine._runner.steps[2:7]] == [4] * 5
    assert [dict(step)[3] for step in engine._runner.steps[2:7]] == [5] * 5
    assert tokens_of(long) == [expected(range(30), 2)]
    assert [tokens_of(r) for r in others] == [[expected([i], 20)] for i in range(3)]


def test_room_to_grow_spares_preemptions():
    counts = []
    for careful in (True, False):
        engine = fake_engine(num_blocks=64, block_size=4, max_model_len=64, num_cpu_blocks=99)
        if not careful:
            engine.scheduler._headroom = lambda running: 0
        rng = random.Random(4)
        for i in range(40):
            engine.add_request([i] * rng.randint(1, 20), greedy(rng.randint(1, 40)))
        run_all(engine)
        counts.append(engine.scheduler.num_preemptions)
    assert 3 * counts[0] < 2 * counts[1], f"{counts[0]} preemptions with room to grow, {counts[1]} without"


def test_what_arrives_is_not_preempted_before_it_was_computed():
    engine = fake_engine(num_blocks=8, block_size=2, max_model_len=16, num_cpu_blocks=9, policy="priority")
    old, arriving = (engine.add_request([i, 2], greedy(14), priority=p) for i, p in enumerate((-2, 5)))
    for _ in range(6):
        engine.step()
    assert engine.blocks.num_free == 0
    seq = arriving.outputs[0].seq
    seq.arriving = True
    urgent = engine.add_request([9], greedy(1), priority=-1)
    plan = engine.scheduler.schedule()
    assert plan.preempted == []
    assert [chunk.seq for chunk in plan.chunks if chunk.seq is seq]
    engine.scheduler.fail(plan)
    run_all(engine)
    assert [tokens_of(r) for r in (old, arriving, urgent)] == [
        [expected([0, 2], 14)],
        [expected([1, 2], 14)],
        [expected([9], 1)],
    ]


def test_who_finds_no_blocks_waits_for_one_that_arrives():
    engine = fake_engine(num_blocks=6, block_size=2, max_model_len=12, num_cpu_blocks=9)
    old, arriving = engine.add_request([0, 2, 3, 4], greedy(7)), engine.add_request([1, 2, 3], greedy(8))
    for _ in range(3):
        engine.step()
    assert engine.blocks.num_free == 0
    assert old.outputs[0].seq.num_computed == 6
    seq = arriving.outputs[0].seq
    seq.arriving = True
    plan = engine.scheduler.schedule()
    assert [chunk.seq for chunk in plan.chunks] == [seq], "the first one has no block to go on, and takes none"
    assert plan.preempted == []
    engine.scheduler.fail(plan)
    run_all(engine)
    assert tokens_of(old) + tokens_of(arriving) == [expected([0, 2, 3, 4], 7), expected([1, 2, 3], 8)]


def test_lower_priority_values_are_served_first():
    engine = fake_engine(max_num_seqs=1, policy="priority")
    requests = [engine.add_request([i], greedy(2), priority=p) for i, p in enumerate((3, 1, 2, 1, -7))]
    run_all(engine)
    times = [request.metrics.first_scheduled_time for request in requests]
    assert sorted(range(5), key=times.__getitem__) == [4, 1, 3, 2, 0]


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_an_urgent_request_preempts_lower_ones_and_only_as_many_as_needed(kind):
    engine = fake_engine(num_blocks=16, block_size=4, policy="priority", ageing=math.inf, **KINDS[kind])
    low = [engine.add_request([i, 2, 3, 4, 5], greedy(12), priority=i) for i in range(5)]
    for _ in range(3):
        engine.step()
    running = list(engine.scheduler.running)
    assert len(running) == 5
    urgent = engine.add_request(list(range(30)), greedy(4), priority=-1)
    engine.step()
    assert urgent.outputs[0].seq.status is Status.RUNNING
    gone = [seq for seq in running if seq.waits]
    assert 0 < len(gone) < 5
    assert gone == running[-len(gone) :], "the last in order go"
    run_all(engine)
    assert tokens_of(urgent) == [expected(range(30), 4)]
    assert [tokens_of(r) for r in low] == [[expected([i, 2, 3, 4, 5], 12)] for i in range(5)]


def test_room_that_was_made_for_an_urgent_request_is_for_it_and_for_those_that_grow():
    engine = fake_engine(num_blocks=8, block_size=4, max_model_len=32, policy="priority", ageing=math.inf)
    growing = engine.add_request(list(range(8)), greedy(9), priority=1)
    victim = engine.add_request(list(range(11)), greedy(9), priority=2)
    engine.step()
    urgent = engine.add_request(list(range(20, 40)), greedy(2), priority=0)
    engine.step()  # `growing` takes its third block; five are left, just what `urgent` needs
    assert [seq.id for seq in engine.scheduler.running] == [2, 0]
    run_all(engine)
    assert tokens_of(growing) + tokens_of(victim) == [expected(range(n), 9) for n in (8, 11)]
    assert tokens_of(urgent) == [expected(range(20, 40), 2)]


def test_nobody_is_preempted_in_vain_or_by_an_equal():
    engine = fake_engine(num_blocks=16, block_size=4, policy="priority", ageing=math.inf)
    high = engine.add_request(list(range(20)), greedy(20), priority=-5)
    low = engine.add_request(list(range(10)), greedy(8), priority=5)
    engine.step()
    equal = engine.add_request(list(range(20, 40)), greedy(3), priority=5)
    unfit = engine.add_request(list(range(40, 45)) * 12, greedy(3), priority=0)  # fits only without `high`
    engine.step()
    assert low.outputs[0].seq.status is Status.RUNNING
    assert equal.outputs[0].seq.status is unfit.outputs[0].seq.status is Status.WAITING
    run_all(engine)
    assert low.result().metrics.num_preemptions + high.result().metrics.num_preemptions == 0


def test_an_urgent_request_preempts_where_sequences_run_out():
    engine = fake_engine(max_num_seqs=2, policy="priority", ageing=math.inf, num_cpu_blocks=9)
    low = [engine.add_request([i], greedy(20), priority=1) for i in range(2)]
    engine.step()
    urgent = engine.add_request([9, 9], greedy(3))
    engine.step()
    assert [seq.id for seq in engine.scheduler.running] == [2, 0]
    run_all(engine)
    assert tokens_of(urgent) == [expected([9, 9], 3)]
    assert [tokens_of(r) for r in low] == [[expected([i], 20)] for i in range(2)]
    assert engine.stats().preemptions_swapped + engine.stats().preemptions_recomputed == 1


def test_waiting_makes_up_for_priority(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("qengine.engine.engine.time.monotonic", lambda: now[0])
    engine = fake_engine(max_num_seqs=1, policy="priority", ageing=10.0)
    low = engine.add_request([1], greedy(2), priority=2)
    now[0] = 19.0
    early = engine.add_request([2], greedy(2), priority=0)
    now[0] = 21.0
    late = engine.add_request([3], greedy(2), priority=0)
    run_all(engine)
    order = sorted(r.outputs[0].seq for r in (low, early, late))
    assert order == [early.outputs[0].seq, low.outputs[0].seq, late.outputs[0].seq]
    assert [step[0][0] for step in engine._runner.steps] == [1, 1, 0, 0, 2, 2]


def test_a_stream_of_urgent_requests_starves_nobody(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("qengine.engine.engine.time.monotonic", lambda: now[0])
    for ageing, waits in ((5.0, False), (math.inf, True)):
        engine = fake_engine(max_num_seqs=1, num_cpu_blocks=8, policy="priority", ageing=ageing)
        low = engine.add_request([1], greedy(2), priority=3)
        for i in range(60):
            now[0] += 1.0
            engine.add_request([2, i % 50], greedy(2), priority=0)
            engine.step()
            engine.check_integrity()
            if low.finished:
                break
        assert low.finished is not waits
        run_all(engine)


def test_priority_is_refused_where_nothing_looks_at_it():
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        fake_engine().add_request([1], greedy(1), priority=1)
    assert fake_engine().add_request([1], greedy(1), priority=0)
    for wrong in (True, 0.5, "1", 2**31):
        with pytest.raises(RequestError, match="priority"):
            fake_engine(policy="priority").add_request([1], greedy(1), priority=wrong)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=25), st.integers(0, 2))
def test_every_step_advances_the_first_in_order(sizes, kind):
    engine = fake_engine(num_blocks=15, block_size=4, max_num_batched_tokens=24, **list(KINDS.values())[kind])
    for i, (prompt, count) in enumerate(sizes):
        engine.add_request([i, *range(prompt - 1)], greedy(count))
    while engine.has_unfinished():
        first = min((*engine.scheduler.waiting, *engine.scheduler.running))
        before, preemptions = (len(first.token_ids), first.num_computed), first.num_preemptions
        engine.step()
        assert (len(first.token_ids), first.num_computed) > before or first.status is Status.FINISHED
        assert first.num_preemptions == preemptions


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failing_step_is_repeated_with_the_same_tokens(overlaps):
    for fail in range(2, 16):
        pool = {"num_blocks": 8, "block_size": 2, "max_model_len": 16, "num_cpu_blocks": 6}
        engine = fake_engine(**pool, seed=fail, overlaps=overlaps)
        requests = [engine.add_request([i, 2, 3], greedy(9)) for i in range(4)]
        engine._runner.fail_at = (fail, fail + 1)
        failed = 0
        while engine.has_unfinished():
            try:
                engine.step()
            except MemoryError:
                failed += 1
            engine.check_integrity()
        assert 1 <= failed <= 2, "two that overlap may fail together"
        assert [tokens_of(r) for r in requests] == [[expected([i, 2, 3], 9)] for i in range(4)]
        assert engine.blocks.num_free == 8


def test_who_waits_for_a_last_token_is_not_preempted_and_gives_its_blocks_in_time():
    # Both need their third block at once and there is none; but the first one's last token is already under way.
    engine = fake_engine(num_blocks=4, block_size=2, max_model_len=8, overlaps=True)
    first, second = engine.add_request([1, 2], greedy(3)), engine.add_request([3, 4], greedy(5))
    run_all(engine)
    assert tokens_of(first) + tokens_of(second) == [expected([1, 2], 3), expected([3, 4], 5)]
    assert engine.scheduler.num_preemptions == 0


def test_orders_come_only_with_steps_that_compute():
    for seed in range(30):
        engine = fake_engine(num_blocks=5, block_size=2, max_model_len=10, num_cpu_blocks=6, overlaps=True, seed=seed)
        plans, inner = [], engine.scheduler.schedule
        engine.scheduler.schedule = lambda plans=plans, inner=inner: plans.append(inner()) or plans[-1]
        for i in range(5):
            engine.add_request([i, 3][: 1 + i % 2], greedy(3 + (i + seed) % 5))
        run_all(engine)
        assert any(plan.swap for plan in plans)
        assert all(plan.chunks for plan in plans if plan.swap)

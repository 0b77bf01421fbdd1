import random

import pytest
from fake_runner import expected, fake_engine, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.errors import QEngineError, RequestError
from qengine.sampling_params import SamplingParams


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def outputs(request):
    return [o.token_ids for o in request.result().outputs]


def test_one_request_gives_the_models_tokens():
    engine = fake_engine()
    request = engine.add_request([1, 2, 3], greedy(7))
    run_all(engine)
    assert outputs(request) == [expected([1, 2, 3], 7)]
    assert engine.blocks.num_free == 64
    assert request.result().outputs[0].finish_reason == "length"
    assert request.metrics.finished_time >= request.metrics.first_token_time >= request.metrics.arrival_time


def test_long_prompt_is_computed_in_chunks_beside_decodes():
    engine = fake_engine(max_num_batched_tokens=8)
    first = engine.add_request([5], greedy(12))
    engine.step()
    long = engine.add_request(list(range(30)), greedy(3))
    run_all(engine)
    runner = engine._runner
    assert all(sum(n for _, n in step) <= 8 for step in runner.steps)
    assert [n for step in runner.steps[1:6] for seq, n in step if seq == 0] == [1] * 5, "decodes go on beside a prompt"
    assert outputs(first) == [expected([5], 12)]
    assert outputs(long) == [expected(range(30), 3)]


def test_never_more_than_max_num_seqs_run():
    engine = fake_engine(max_num_seqs=3)
    requests = [engine.add_request([i], greedy(5)) for i in range(10)]
    run_all(engine)
    assert max(len(step) for step in engine._runner.steps) == 3
    assert [outputs(r) for r in requests] == [[expected([i], 5)] for i in range(10)]


def test_requests_start_in_the_order_of_arrival():
    engine = fake_engine(max_num_seqs=1)
    requests = [engine.add_request([i], greedy(2)) for i in range(4)]
    run_all(engine)
    times = [r.metrics.first_scheduled_time for r in requests]
    assert times == sorted(times)
    assert [step[0][0] for step in engine._runner.steps] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_running_sequences_keep_two_blocks_each_to_grow():
    engine = fake_engine(num_blocks=128, block_size=4, max_num_batched_tokens=512, max_model_len=256)
    long = [engine.add_request([i] * 242, greedy(9)) for i in range(2)]  # 61 blocks each, and 6 are left
    engine.step()
    short = [engine.add_request([9, 9], greedy(9)) for _ in range(2)]
    engine.step()
    running = [len(request.outputs[0].seq.token_ids) > 2 for request in short]
    assert running == [True, False], "5 blocks are left for three, who may want 6"
    run_all(engine)
    assert [outputs(r) for r in long] == [[expected([i] * 242, 9)] for i in range(2)]


def test_preempted_and_undisturbed_requests_give_the_same_tokens():
    engine = fake_engine(num_blocks=8, block_size=2, max_model_len=16, prefix_caching=False)
    requests = [engine.add_request([i, i + 1, i + 2], greedy(10)) for i in range(5)]
    run_all(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [outputs(r) for r in requests] == [[expected([i, i + 1, i + 2], 10)] for i in range(5)]
    assert sum(r.result().metrics.num_preemptions for r in requests) == engine.scheduler.num_preemptions
    assert requests[0].result().metrics.num_preemptions == 0, "the oldest is never preempted"


def test_n_sequences_compute_their_prompt_once_and_copy_on_write():
    engine = fake_engine(prefix_caching=False)
    request = engine.add_request([1, 2, 3, 4, 5, 6], greedy(6, n=4))
    run_all(engine)
    assert engine._runner.steps[0] == [(0, 6)]
    assert [n for _, n in engine._runner.steps[1]] == [1, 1, 1, 1]
    assert engine._runner.copies == 3
    assert outputs(request) == [expected([1, 2, 3, 4, 5, 6], 6)] * 4


def test_n_greater_than_max_num_seqs_is_served():
    engine = fake_engine(max_num_seqs=2)
    request = engine.add_request([1, 2, 3, 4, 5], greedy(4, n=5))
    other = engine.add_request([9], greedy(3))
    run_all(engine)
    assert outputs(request) == [expected([1, 2, 3, 4, 5], 4)] * 5
    assert outputs(other) == [expected([9], 3)]


def test_n_8_in_a_pool_for_one_is_recomputed_never_aborted():
    engine = fake_engine(num_blocks=6, block_size=4, max_model_len=24)
    request = engine.add_request(list(range(9)), greedy(14, n=8))
    run_all(engine)
    assert outputs(request) == [expected(range(9), 14)] * 8
    assert engine.scheduler.num_preemptions > 0


def test_prompt_longer_than_the_pool_is_refused_with_numbers_and_the_queue_goes_on():
    engine = fake_engine(num_blocks=4, block_size=4, max_model_len=64)
    before = engine.add_request([1], greedy(3))
    with pytest.raises(RequestError, match=r"20 tokens.*KV cache holds 16"):
        engine.add_request(list(range(20)), greedy(3))
    after = engine.add_request([2], greedy(3))
    run_all(engine)
    assert outputs(before) + outputs(after) == [expected([1], 3), expected([2], 3)]


def test_context_end_is_length():
    engine = fake_engine(max_model_len=10)
    request = engine.add_request([1, 2, 3], greedy(None))
    run_all(engine)
    assert outputs(request) == [expected([1, 2, 3], 7)]
    assert request.result().outputs[0].finish_reason == "length"


def test_a_sequence_may_fill_the_whole_pool():
    engine = fake_engine(num_blocks=5, block_size=2, max_model_len=64)
    request = engine.add_request([1, 2, 3], greedy(None))
    run_all(engine)
    assert outputs(request) == [expected([1, 2, 3], 7)]


def test_abort_frees_blocks_at_once_running_and_waiting():
    engine = fake_engine(max_num_seqs=1)
    running = engine.add_request([1, 2, 3], greedy(30, n=3))
    waiting = engine.add_request([4], greedy(30))
    last = engine.add_request([5], greedy(2))
    for _ in range(3):
        engine.step()
    engine.abort(running)
    engine.abort(waiting)
    engine.check_integrity()
    assert engine.blocks.num_free == 64
    assert running.finished
    assert {o.finish_reason for o in running.result().outputs} == {"abort"}
    run_all(engine)
    assert outputs(last) == [expected([5], 2)]


def test_prefix_cache_gives_the_same_tokens_and_counts_hits():
    engine = fake_engine()
    prompt = list(range(11))
    results = []
    for _ in range(2):
        request = engine.add_request(prompt, greedy(5))
        run_all(engine)
        results.append(outputs(request))
    assert results[0] == results[1] == [expected(prompt, 5)]
    assert request.result().num_cached_tokens == 8
    salted = engine.add_request(prompt, greedy(5), cache_salt="other")
    run_all(engine)
    assert salted.result().num_cached_tokens == 0


def test_same_request_id_twice_serves_both():
    engine = fake_engine()
    requests = [engine.add_request([i], greedy(3), request_id="same") for i in (1, 2)]
    run_all(engine)
    assert [outputs(r) for r in requests] == [[expected([i], 3)] for i in (1, 2)]


def test_no_finite_logit_ends_that_request_with_an_error():
    engine = fake_engine()
    engine._runner.nan_after = 2
    request = engine.add_request([1], greedy(9, n=2))
    run_all(engine)
    assert isinstance(request.error, QEngineError)
    assert "nan" in str(request.error)
    assert engine.blocks.num_free == 64


def test_closing_a_stream_aborts_it():
    engine = fake_engine()
    request = engine.add_request([1, 2], greedy(20), streamed=True)
    stream = engine.stream(request)
    got = [token for _ in range(3) for token in next(stream).token_ids]
    stream.close()
    assert got == expected([1, 2], 3)
    assert not engine.has_unfinished()
    assert engine.blocks.num_free == 64


def test_two_streams_interleave_without_losing_tokens():
    engine = fake_engine()
    requests = [engine.add_request([i], greedy(6), streamed=True) for i in (1, 2)]
    streams = [engine.stream(r) for r in requests]
    got = [[], []]
    for _ in range(6):
        for i, stream in enumerate(streams):
            got[i] += next(stream).token_ids
    assert got == [expected([i], 6) for i in (1, 2)]


@settings(max_examples=120, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_histories_give_each_request_its_own_tokens(rng: random.Random):
    block_size = rng.choice([1, 2, 4])
    engine = fake_engine(
        num_blocks=rng.randint(4, 20),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(1, 16),
        max_model_len=32,
        prefix_caching=rng.random() < 0.7,
        eos=[0, 1],
    )
    longest = engine.limits.max_len
    if longest < 3:
        return
    live, done, aborted = [], [], 0
    for _ in range(rng.randint(5, 60)):
        if rng.random() < 0.3:
            prompt = [rng.randint(2, 4) for _ in range(rng.randint(1, longest - 1))]
            count = rng.choice([None, rng.randint(1, 12)])
            params = greedy(count, n=rng.choice([1, 1, 1, 2, 4]), ignore_eos=rng.random() < 0.3)
            live.append(engine.add_request(prompt, params))
        if live and rng.random() < 0.05:
            engine.abort(live.pop(rng.randrange(len(live))))
            aborted += 1
        engine.step()
        engine.check_integrity()
        done += [r for r in live if r.finished]
        live = [r for r in live if not r.finished]
    run_all(engine)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    for request in done + live:
        count = min(request.params.max_tokens or longest, longest - len(request.prompt_token_ids))
        eos = () if request.params.ignore_eos else (0, 1)
        want = expected(request.prompt_token_ids, count, eos=eos)
        assert outputs(request) == [want] * request.params.n

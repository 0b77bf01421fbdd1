"""Requests with a grammar in the engine: when they wait, and that their draws wait for tokens and nothing else does."""

import contextlib
import threading
import time
from concurrent.futures import Future

import pytest
from fake_runner import VOCAB, expected, fake_engine, next_token, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.errors import RequestError
from qengine.sampling_params import SamplingParams
from qengine.structured_outputs import StructuredOutputs

END = 0


class Language:
    """The next token is one of three that depend on the sum of the output; after `length` of them only END follows."""

    stop_ids = (END,)

    def __init__(self, length):
        self.length = length
        self.output = []

    def allowed(self, token_ids, start):
        assert -1 not in token_ids[start:], "a mask is asked for before the tokens are known"
        return following(token_ids[start:], self.length)

    def follow(self, token_ids, start=0):
        self.output = [token for token in token_ids[start:] if token >= 0]

    @property
    def ended(self):
        return END in self.output


def following(output, length):
    return [END] if len(output) >= length else [1 + (sum(output) + i) % (VOCAB - 1) for i in range(3)]


def written(prompt, length, count=10**9):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + min(length + 1, count):
        tokens.append(next_token(tokens, VOCAB, following(tokens[len(prompt) :], length)))
    return tokens[len(prompt) :]


class FakeGrammars:
    """Compiles when told to; a grammar is its length."""

    timeout = 60.0

    def __init__(self):
        self.futures = {}
        self.closed = False

    def request(self, wanted):
        return self.futures.setdefault(wanted.regex, Future())

    def ready(self, length):
        self.futures.setdefault(f"x{{{length}}}", Future()).set_result(length)

    def matcher(self, length):
        return Language(length)

    def close(self):
        self.closed = True


def shaped(length, count=60, **more):
    wanted = StructuredOutputs(regex=f"x{{{length}}}")
    return SamplingParams(temperature=0, max_tokens=count, structured_outputs=wanted, **more)


def free(count):
    return SamplingParams(temperature=0, max_tokens=count)


def engine_with(*lengths, **options):
    engine = fake_engine(eos=(END,), **options)
    engine._grammars = FakeGrammars()
    for length in lengths:
        engine._grammars.ready(length)
    return engine


def outputs(request):
    return [output.completion().token_ids for output in request.outputs]


@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_with_and_without_a_grammar_share_steps(overlaps):
    engine = engine_with(5, 9, overlaps=overlaps)
    requests = [engine.add_request([3, 4, i], shaped((5, 9)[i % 2]) if i % 3 else free(12)) for i in range(9)]
    run_all(engine)
    for i, request in enumerate(requests):
        want = written([3, 4, i], (5, 9)[i % 2]) if i % 3 else expected([3, 4, i], 12, eos=(END,))
        assert outputs(request) == [want]
        if i % 3:
            assert request.outputs[0].finish_reason == "stop"
    steps = len(engine._runner.steps)
    assert steps <= 12, "every sequence takes part in every step"
    assert (engine._runner.later > 5) == overlaps, "steps are launched ahead and drawn later"


def test_steps_of_free_rows_are_drawn_at_once():
    engine = engine_with(overlaps=True)
    engine.add_request([1, 2], free(20))
    run_all(engine)
    assert engine._runner.later == 0


POOLS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(13, 26),
        "block_size": st.sampled_from([2, 4]),
        "num_cpu_blocks": st.sampled_from([0, 12]),
        "max_num_batched_tokens": st.integers(3, 24),
        "max_num_seqs": st.integers(1, 6),
        "overlaps": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    POOLS,
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), max_size=2),
)
def test_tokens_are_those_of_a_sequence_alone(pool, requests, failures):
    """Through preemption by swap and recomputation, forks, chunks and steps that fail."""
    engine = engine_with(*range(1, 10), max_model_len=24, **pool)
    engine._runner.fail_at = failures
    made = []
    for i, (prompt, length, n) in enumerate(requests):
        ids = [7 + i] * prompt
        params = shaped(length, 14, n=n) if length else SamplingParams(temperature=0, max_tokens=14, n=n)
        want = written(ids, length, 14) if length else expected(ids, 14, eos=(END,))
        made.append((engine.add_request(ids, params), [want] * n))
    for _ in range(2000):
        if not engine.has_unfinished():
            break
        with contextlib.suppress(MemoryError):
            engine.step()
        engine.check_integrity()
    assert [outputs(request) for request, _ in made] == [want for _, want in made]
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_grammar_that_is_being_compiled_holds_up_nobody(overlaps):
    engine = engine_with(overlaps=overlaps)
    waits = engine.add_request([1, 2], shaped(4))
    other = engine.add_request([3], free(6))
    engine.check_integrity()
    while not other.finished:
        engine.step()
    assert not waits.finished
    assert engine.has_unfinished()
    assert not engine.can_step
    assert (engine.stats().compiling, engine.stats().waiting) == (1, 0)
    start = time.monotonic()
    assert engine.step() == []
    assert time.monotonic() - start >= 0.05, "a step with nothing to do waits"
    threading.Timer(0.02, engine._grammars.ready, [4]).start()
    run_all(engine)
    assert outputs(waits) == [written([1, 2], 4)]


def test_it_keeps_its_place_in_the_order():
    engine = engine_with(max_num_seqs=1)
    first = engine.add_request([1], shaped(2))
    second, third = engine.add_request([2], free(3)), engine.add_request([3], free(3))
    engine.step()
    engine._grammars.ready(2)
    ended = []
    while engine.has_unfinished():
        ended += [r for r in engine.step() if r.finished]
    assert ended == [second, first, third]


def test_one_that_cannot_be_compiled_ends_alone():
    engine = engine_with()
    wrong, told = engine.add_request([1], shaped(3, n=2)), []
    engine.compiling.on_ready = lambda: told.append(True)
    good = engine.add_request([2], free(4))
    engine.step()
    engine._grammars.futures["x{3}"].set_exception(RequestError("no"))
    assert told
    assert wrong in engine.step()
    assert wrong.finished
    assert str(wrong.error) == "no"
    run_all(engine)
    assert outputs(good) == [expected([2], 4, eos=(END,))]
    with pytest.raises(RequestError, match=r"^no$"):
        engine.add_request([1], shaped(3))
    assert not engine.has_unfinished()


def test_an_unforeseen_failure_is_the_requests_too():
    engine = engine_with()
    request = engine.add_request([1], shaped(3))
    engine._grammars.futures["x{3}"].set_exception(ValueError("odd"))
    assert engine.step() == [request]
    assert "ValueError: odd" in str(request.error)


def test_aborted_or_closed_while_it_waits():
    engine = engine_with()
    grammars = engine._grammars
    one, two = engine.add_request([1], shaped(3), streamed=True), engine.add_request([1], shaped(5))
    engine.abort(one)
    assert one.finished
    assert [delta.finish_reason for delta in one.take_deltas()] == ["abort"]
    grammars.ready(3)
    assert engine.step() == []
    engine.check_integrity()
    engine.close()
    assert two.finished
    assert grammars.closed


def test_one_that_takes_too_long_is_refused():
    engine = engine_with()
    engine._grammars.timeout = 0.05
    request = engine.add_request([1], shaped(3))
    while not request.finished:
        engine.step()
    assert "takes too long to compile" in str(request.error)


def test_the_end_of_the_text_ends_it_before_min_tokens_and_with_ignore_eos():
    for more in ({"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "ignore_eos": True}):
        engine = engine_with(4, overlaps=True)
        request = engine.add_request([1, 2], shaped(4, **more))
        run_all(engine)
        assert outputs(request) == [written([1, 2], 4)]
        assert request.outputs[0].finish_reason == "stop"


def test_a_failing_draw_is_taken_back():
    engine = engine_with(12, overlaps=True)
    request, other = engine.add_request([1, 2], shaped(12)), engine.add_request([5], free(14))
    for _ in range(3):
        engine.step()
    launch, broken = engine._runner.launch, []

    def failing(*arguments, **options):
        flight = launch(*arguments, **options)
        if options["later"] and not broken:
            broken.append(True)
            flight.draw = lambda: (_ for _ in ()).throw(MemoryError("no memory to draw"))
        return flight

    engine._runner.launch = failing
    with pytest.raises(MemoryError):
        run_all(engine)
    engine.check_integrity()
    run_all(engine)
    assert outputs(request) == [written([1, 2], 12)]
    assert outputs(other) == [expected([5], 14, eos=(END,))]

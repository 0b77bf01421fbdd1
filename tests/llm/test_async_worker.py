"""The engine's thread and its streams over a runner without tensors: order, backpressure, failures, idling, closing."""

import asyncio
import gc
import threading
import time
import weakref
from itertools import pairwise

import pytest
from fake_runner import expected, fake_engine

from qengine.async_llm import AsyncLLM, EngineDeadError, QueueFullError, RequestOutputKind
from qengine.engine import async_worker
from qengine.engine.async_delivery import Delivery
from qengine.errors import ConfigError, QEngineError, RequestError
from qengine.sampling_params import SamplingParams

LIMIT = 60


@pytest.fixture(params=[False, True], ids=["one step", "one ahead"], autouse=True)
def overlaps(request, monkeypatch):
    """Each test runs on an engine that waits for its steps, and on one that launches the next before."""
    monkeypatch.setattr(FakeLLM, "overlaps", request.param)


class FakeLLM:
    """An LLM's outside over a fake engine; steps can be held, slowed and made to fail."""

    overlaps = False

    def __init__(self, **settings):
        self.engine = fake_engine(**{"overlaps": self.overlaps, **settings})
        self._tokenizer = None
        self.closed = False
        self.thread = None
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at = None
        self.delay = 0.0
        runner = self.engine._runner
        run = runner.launch

        def guarded(*arguments, **options):
            assert self.gate.wait(LIMIT), "the gate was never opened"
            self.thread = threading.current_thread().name
            if self.fail_at is not None and len(runner.steps) >= self.fail_at:
                raise MemoryError("no memory for this step")
            time.sleep(self.delay)
            return run(*arguments, **options)

        runner.launch = guarded
        runner.close = lambda: None
        self.runner = runner

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0, max_tokens=3)

    def close(self):
        self.engine.close()
        self.closed = True


def greedy(count=8, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def serve(scenario, **settings):
    """Run `scenario(async llm, fake llm)` in a loop of its own, with a time limit."""
    options = {name: settings.pop(name) for name in ("max_waiting_requests", "when_full") if name in settings}
    fake = FakeLLM(**settings)

    async def main():
        llm = AsyncLLM.from_llm(fake, **options)
        try:
            await asyncio.wait_for(scenario(llm, fake), LIMIT)
        finally:
            fake.gate.set()
            await llm.close()
        assert fake.closed
        assert not llm.is_running

    asyncio.run(main())


async def collect(llm, prompt, params=None, **more):
    return [output async for output in llm.generate(prompt, params or greedy(), **more)]


def joined(parts):
    return [token for part in parts for token in part]


async def until(condition):
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def test_many_at_once_get_their_own_tokens():
    async def scenario(llm, fake):
        prompts = [[i % 50, (7 * i) % 50, i % 3] for i in range(40)]
        results = await asyncio.gather(*(collect(llm, p, greedy(2 + i % 9)) for i, p in enumerate(prompts)))
        for i, (prompt, outputs) in enumerate(zip(prompts, results, strict=True)):
            assert outputs[-1].outputs[0].token_ids == expected(prompt, 2 + i % 9)
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].prompt_token_ids == prompt
        assert fake.thread == "qengine-engine"
        assert max(len(step) for step in fake.runner.steps) > 8, "requests were not batched"
        await llm.call(lambda engine: engine.check_integrity())
        assert llm.num_open_requests == llm.num_waiting_requests == 0

    serve(scenario)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kinds(kind):
    async def scenario(llm, fake):
        outputs = await collect(llm, [1, 2, 3], greedy(9), output_kind=kind)
        tokens = [o.outputs[0].token_ids for o in outputs]
        whole = expected([1, 2, 3], 9)
        if kind is RequestOutputKind.DELTA:
            assert joined(tokens) == whole
            assert all(tokens)
        elif kind is RequestOutputKind.FINAL_ONLY:
            assert tokens == [whole]
        else:
            assert tokens[-1] == whole
            assert all(whole[: len(t)] == t for t in tokens)
            assert [len(t) for t in tokens] == sorted({len(t) for t in tokens})
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert outputs[-1].metrics.finished_time >= outputs[-1].metrics.first_token_time > 0

    serve(scenario)


def test_default_parameters_and_n():
    async def scenario(llm, fake):
        assert (await collect(llm, [4]))[-1].outputs[0].token_ids == expected([4], 8)
        last = [o async for o in llm.generate([4])][-1]
        assert last.outputs[0].token_ids == expected([4], 3)
        both = (await collect(llm, [5, 6], greedy(5, n=3)))[-1]
        assert [c.token_ids for c in both.outputs] == [expected([5, 6], 5)] * 3
        assert [c.index for c in both.outputs] == [0, 1, 2]
        delta = await collect(llm, [5, 6], greedy(5, n=2), output_kind=RequestOutputKind.DELTA)
        for index in range(2):
            parts = [c.token_ids for o in delta for c in o.outputs if c.index == index]
            assert joined(parts) == expected([5, 6], 5)

    serve(scenario)


def test_a_slow_consumer_misses_nothing_and_delays_nobody():
    async def scenario(llm, fake):
        slow = llm.generate([1, 1], greedy(40), output_kind=RequestOutputKind.DELTA)
        first = await anext(slow)
        fast = await collect(llm, [2, 2], greedy(30))  # finishes although `slow` takes nothing
        assert fast[-1].outputs[0].token_ids == expected([2, 2], 30)
        await until(lambda: not fake.engine.has_unfinished())
        rest = [o async for o in slow]
        assert len(rest) <= 2, "what piled up comes in one output"
        tokens = joined(o.outputs[0].token_ids for o in [first, *rest])
        assert tokens == expected([1, 1], 40)

    serve(scenario)


def test_first_tokens_are_handed_on_before_the_next_ones_of_others(monkeypatch):
    """A caller that waits for its first token does not wait for the other callers of its step too."""
    sent = []
    send = Delivery.send
    monkeypatch.setattr(Delivery, "send", lambda self, reports: (sent.append(list(reports)), send(self, reports))[1])

    async def scenario(llm, fake):
        fake.gate.clear()
        early = [asyncio.create_task(collect(llm, [i], greedy(30))) for i in range(4)]
        await until(lambda: llm.num_open_requests == 4)
        fake.gate.set()
        await until(lambda: any(len(reports) == 4 for reports in sent))
        await collect(llm, [9], greedy(2))
        await asyncio.gather(*early)

    serve(scenario)
    mixed = [reports for reports in sent if len({p.prompt_token_ids is None for _, p in reports}) == 2]
    assert mixed, "no step had a first token beside others"
    for reports in mixed:
        assert reports[0][1].prompt_token_ids is not None


def test_where_steps_run_ahead_tokens_are_handed_on_when_the_next_one_is_launched(monkeypatch, overlaps):
    """Their consumers then run while the engine's thread waits; first tokens and ends go before."""
    monkeypatch.setattr(FakeLLM, "overlaps", True)
    happened = []
    send = Delivery.send

    def watched(self, reports):
        if everything := [*self._held, *reports]:
            happened.append("first or end" if any(p.prompt_token_ids is not None for _, p in everything) else "next")
        send(self, reports)

    monkeypatch.setattr(Delivery, "send", watched)

    async def scenario(llm, fake):
        launch = fake.runner.launch
        fake.runner.launch = lambda *a, **k: (happened.append("launch"), launch(*a, **k))[1]
        outputs = await collect(llm, [5, 6], greedy(12), output_kind=RequestOutputKind.DELTA)
        assert joined(o.outputs[0].token_ids for o in outputs) == expected([5, 6], 12)

    serve(scenario)
    assert happened[:4] == ["launch", "launch", "first or end", "launch"]
    assert happened.count("launch") == 12
    assert happened[4:20] == ["launch", "next"] * 8
    assert happened[-1] == "first or end"


@pytest.mark.parametrize("how", ["aclose", "cancel", "break", "abort"])
def test_leaving_frees_the_blocks_within_a_step(how):
    async def scenario(llm, fake):
        fake.delay = 0.002
        generator = llm.generate([1, 2, 3], greedy(1000), "mine")
        last = []

        async def consume():
            async for output in generator:
                last.append(output)
                if how == "break" and len(last) == 3:
                    break

        other = asyncio.create_task(collect(llm, [7, 8], greedy(50)))
        task = asyncio.create_task(consume())
        await until(lambda: len(last) >= 3)
        steps = len(fake.runner.steps) + (how == "break")
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "abort":
            await llm.abort("mine")
            sequences = await llm.call(lambda engine: len(engine._owner))
            assert sequences <= 1
            await task
            assert last[-1].outputs[0].finish_reason == "abort"
            assert last[-1].finished
        else:
            if how == "aclose":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await generator.aclose()
            del generator
        await llm.call(lambda engine: engine.check_integrity())
        tables = await llm.call(lambda engine: [len(r.prompt_token_ids) for r, _ in engine._owner.values()])
        assert tables in ([2], []), "the request is still in the engine"
        mine = next(seq for step in fake.runner.steps for seq, count in step if count == 3)
        after = [step for step in fake.runner.steps[steps:] if mine in dict(step)]
        assert len(after) <= 2, "it was computed on: at most the step under way and the next may hold it"
        assert (await other)[-1].outputs[0].token_ids == expected([7, 8], 50)
        free = await llm.call(lambda engine: (engine.blocks.num_free, engine.blocks.num_blocks))
        assert free[0] == free[1]
        assert llm.num_open_requests == llm.num_waiting_requests == 0

    serve(scenario, max_model_len=2000, num_blocks=600)


def test_one_bad_request_harms_no_other():
    async def scenario(llm, fake):
        good = asyncio.create_task(collect(llm, [1, 2], greedy(20)))
        for bad, params in (([99], greedy()), (list(range(40)) * 2, greedy()), ([1], greedy(stop_token_ids=[77]))):
            with pytest.raises(RequestError):
                await collect(llm, bad, params)
        with pytest.raises(RequestError, match="one prompt, got 2"):
            await collect(llm, [[1], [2]])
        with pytest.raises(RequestError, match="SamplingParams"):
            await collect(llm, [1], {"temperature": 0})
        with pytest.raises(RequestError, match="tokenizer"):
            await collect(llm, "text")
        assert (await good)[-1].outputs[0].token_ids == expected([1, 2], 20)
        assert not llm.errored
        assert llm.num_waiting_requests == 0

    serve(scenario)


def test_unusable_logits_end_their_request_alone():
    async def scenario(llm, fake):
        fake.runner.nan_after = 4
        with pytest.raises(QEngineError, match="no finite logit"):
            await collect(llm, [1, 2], greedy(20))
        fake.runner.nan_after = None
        assert (await collect(llm, [1, 2], greedy(5)))[-1].outputs[0].token_ids == expected([1, 2], 5)
        assert llm.is_running

    serve(scenario)


def test_an_engine_failure_ends_all_and_stays():
    async def scenario(llm, fake):
        fake.gate.clear()
        tasks = [asyncio.create_task(collect(llm, [i], greedy(30))) for i in range(5)]
        await until(lambda: llm.num_open_requests == 5)
        fake.fail_at = 6
        fake.gate.set()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
            assert isinstance(outcome.__cause__, MemoryError)
            assert "no memory for this step" in str(outcome)
        assert llm.errored
        assert llm.is_stopped
        assert "no memory" in str(llm.dead_error)
        with pytest.raises(EngineDeadError):
            await collect(llm, [1])
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        await until(lambda: fake.closed)
        assert llm.num_open_requests == llm.num_waiting_requests == 0

    serve(scenario)


def test_a_failure_does_not_keep_what_the_steps_held():
    class Tensor:
        pass

    async def scenario(llm, fake):
        kept = []
        run = fake.runner.launch

        def failing(*arguments, **options):
            big = Tensor()
            kept.append(weakref.ref(big))
            run(*arguments, **options)
            raise RuntimeError("the device is lost")

        fake.runner.launch = failing
        with pytest.raises(EngineDeadError):
            await collect(llm, [1])
        await until(lambda: fake.closed)
        gc.collect()
        assert llm.errored
        assert kept[0]() is None, "the failure's traceback keeps a step's tensors"

    serve(scenario)


def test_a_model_that_cannot_be_loaded_says_so_each_time():
    async def main():
        llm = AsyncLLM("/no/such/folder")
        for _ in range(2):
            with pytest.raises(QEngineError, match="no such folder"):
                await llm.start()
        assert not llm.is_running
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_loading_and_steps_leave_the_loop_free():
    class Slow(FakeLLM):
        pass

    async def main():
        def load():
            time.sleep(0.3)
            fake = Slow()
            fake.delay = 0.02
            return fake

        llm = AsyncLLM.from_llm(None)
        llm._load = load
        ticks = []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.005)

        ticker = asyncio.create_task(tick())
        outputs = await collect(llm, [1], greedy(10))
        ticker.cancel()
        assert outputs[-1].outputs[0].token_ids == expected([1], 10)
        assert len(ticks) > 30
        assert max(b - a for a, b in pairwise(ticks)) < 0.25
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_backpressure_waits_in_order():
    async def scenario(llm, fake):
        fake.gate.clear()
        started = []

        async def one(i):
            async for _ in llm.generate([i], greedy(4)):
                if i not in started:
                    started.append(i)

        tasks = [asyncio.create_task(one(i)) for i in range(9)]
        await until(lambda: llm.num_open_requests == 3)
        await asyncio.sleep(0.02)
        assert llm.num_open_requests == llm.num_waiting_requests == 3
        fake.gate.set()
        await asyncio.gather(*tasks)
        assert sorted(started) == list(range(9))
        assert started[-1] > 2, "those that waited outside came before those that waited inside"
        assert llm.num_waiting_requests == 0

    serve(scenario, max_waiting_requests=3, max_num_seqs=2)


def test_a_request_waits_until_its_first_token_and_no_longer():
    async def scenario(llm, fake):
        fake.delay = 0.001
        generator = llm.generate([1], greedy(1000))
        await anext(generator)
        assert llm.num_open_requests == 1
        assert llm.num_waiting_requests == 0
        assert (await collect(llm, [2], greedy(3)))[-1].finished, "its place is free while it runs"
        await generator.aclose()

    serve(scenario, max_waiting_requests=1, when_full="refuse", max_model_len=2000, num_blocks=600)


def test_backpressure_refuses_with_the_numbers():
    async def scenario(llm, fake):
        fake.gate.clear()
        tasks = [asyncio.create_task(collect(llm, [i])) for i in range(2)]
        await until(lambda: llm.num_open_requests == 2)
        with pytest.raises(QueueFullError, match="max_waiting_requests=2"):
            await collect(llm, [9])
        fake.gate.set()
        await asyncio.gather(*tasks)
        assert (await collect(llm, [9]))[-1].finished

    serve(scenario, max_waiting_requests=2, when_full="refuse")


def test_a_caller_that_gives_up_while_it_waits_takes_no_place():
    async def scenario(llm, fake):
        fake.gate.clear()
        first = asyncio.create_task(collect(llm, [1]))
        await until(lambda: llm.num_open_requests == 1)
        waiting = asyncio.create_task(collect(llm, [2]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        fake.gate.set()
        await first
        assert (await collect(llm, [3]))[-1].finished
        assert llm.num_waiting_requests == llm.num_open_requests == 0

    serve(scenario, max_waiting_requests=1)


def test_closing_ends_open_requests_and_refuses_new_ones():
    async def scenario(llm, fake):
        fake.delay = 0.002
        got = []

        async def consume():
            async for output in llm.generate([1], greedy(1000)):
                got.append(output)

        task = asyncio.create_task(consume())
        await until(lambda: got)
        await llm.close()
        await task
        assert got[-1].outputs[0].finish_reason == "abort"
        assert fake.closed
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(llm, [1])
        await llm.close()

    serve(scenario, max_model_len=2000, num_blocks=600)


def test_draining_finishes_what_is_open():
    async def scenario(llm, fake):
        fake.delay = 0.002
        task = asyncio.create_task(collect(llm, [1], greedy(30)))
        await until(lambda: fake.runner.steps)
        closing = asyncio.create_task(llm.close(drain=True))
        assert (await task)[-1].outputs[0].token_ids == expected([1], 30)
        await closing

    serve(scenario)


def test_an_idle_engine_sleeps():
    async def scenario(llm, fake):
        await collect(llm, [1], greedy(3))
        await until(lambda: llm._worker._warm)
        waits, wake = [], llm._worker._wake
        wait = wake.wait
        wake.wait = lambda *a: waits.append(a) or wait(*a)
        await llm.call(lambda engine: None)
        cpu = time.process_time()
        await asyncio.sleep(0.3)
        assert waits == [(None,)], "it woke up by itself"
        assert time.process_time() - cpu < 0.2

    serve(scenario)


def test_a_busy_loop_gets_all_reports_in_one_callback():
    async def scenario(llm, fake):
        outputs = []
        generator = llm.generate([1, 2], greedy(40))
        outputs.append(await anext(generator))
        loop, steps, calls = asyncio.get_running_loop(), len(fake.runner.steps), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a: calls.append(a) or call(*a)
        while fake.engine.has_unfinished():
            time.sleep(0.001)  # the loop is held up
        assert len(fake.runner.steps) - steps > 20
        assert len(calls) <= 1
        outputs += [output async for output in generator]
        assert len(outputs) <= 3
        assert outputs[-1].outputs[0].token_ids == expected([1, 2], 40)

    serve(scenario)


def test_health_is_true_only_if_the_engine_steps():
    async def scenario(llm, fake):
        await llm.check_health()
        fake.gate.clear()
        task = asyncio.create_task(collect(llm, [1]))
        await until(lambda: llm.num_open_requests == 1)
        await asyncio.sleep(0.02)
        with pytest.raises(QEngineError, match=r"has not finished a step within 0\.1 s"):
            await llm.check_health(timeout=0.1)
        fake.gate.set()
        await task
        await llm.check_health()

    serve(scenario)


def test_the_same_id_twice_is_served_twice():
    async def scenario(llm, fake):
        one, two = await asyncio.gather(collect(llm, [1], request_id="x"), collect(llm, [2], request_id="x"))
        assert one[-1].outputs[0].token_ids == expected([1], 8)
        assert two[-1].outputs[0].token_ids == expected([2], 8)
        assert one[-1].request_id == two[-1].request_id == "x"
        await llm.abort(["x", "unknown"])

    serve(scenario)


def test_settings_and_misuse():
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_waiting_requests"):
            AsyncLLM("x", max_waiting_requests=bad)
    with pytest.raises(ConfigError, match="when_full"):
        AsyncLLM("x", when_full="drop")
    llm = AsyncLLM("x")
    assert llm.is_stopped
    assert not llm.errored
    with pytest.raises(QEngineError, match="not started"):
        _ = llm.llm
    llm.shutdown()

    fake = FakeLLM()
    served = AsyncLLM.from_llm(fake)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(collect(served, [1]))
    with pytest.raises(ConfigError, match="another event loop"):
        asyncio.run(collect(served, [1]))
    loop.close()
    served.shutdown(LIMIT)
    assert fake.closed


def test_an_event_loop_that_goes_away_stops_the_thread():
    fake = FakeLLM(max_model_len=2000, num_blocks=600)
    fake.delay = 0.002
    served = AsyncLLM.from_llm(fake)
    loop = asyncio.new_event_loop()
    generator = served.generate([1], greedy(1500))
    loop.run_until_complete(anext(generator))
    loop.close()
    served._worker.join(LIMIT)
    assert fake.closed


def test_a_dropped_front_stops_the_thread():
    fake = FakeLLM()
    served = AsyncLLM.from_llm(fake)
    asyncio.run(served.start())
    worker = served._worker
    del served
    gc.collect()
    worker.join(LIMIT)
    assert fake.closed


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(async_worker, "IDLE_SECONDS", 0.02)


def test_pauses_are_used_to_warm_up(short_pauses):
    async def scenario(llm, fake):
        fake.runner.cold = 3
        await llm.start()
        await until(lambda: not fake.runner.cold)
        assert (await collect(llm, [1, 2, 3]))[-1].outputs[0].token_ids == expected([1, 2, 3], 8)
        await until(lambda: llm._worker._warm)

    serve(scenario)


def test_a_request_interrupts_the_warming_up_which_goes_on_later(short_pauses):
    async def scenario(llm, fake):
        fake.runner.cold = 10**6
        await llm.start()
        await until(lambda: fake.runner.cold < 10**6)
        assert (await asyncio.wait_for(collect(llm, [1, 2, 3]), 5))[-1].outputs[0].token_ids == expected([1, 2, 3], 8)
        left = fake.runner.cold
        await until(lambda: fake.runner.cold < left)

    serve(scenario)


def test_an_engine_that_cannot_be_warmed_up_serves(short_pauses, caplog):
    async def scenario(llm, fake):
        def fail(stop):
            raise RuntimeError("no such kernel")

        fake.runner.warm_up = fail
        await llm.start()
        await until(lambda: "no such kernel" in caplog.text)
        assert (await collect(llm, [1, 2, 3]))[-1].outputs[0].token_ids == expected([1, 2, 3], 8)
        assert caplog.text.count("could not be warmed up") == 1

    serve(scenario)

"""Clocks around an engine's steps: what they count, and that nothing of them stays. The GPU's events are faked."""

import time
from types import SimpleNamespace

import pytest
import torch
from fake_runner import FakeRunner, expected, fake_engine, run_all

from qengine.bench.step_trace import HOST_PARTS, Tracer, summary
from qengine.sampling_params import SamplingParams


class Event:
    def __init__(self, enable_timing):
        self.at = None

    def record(self, stream):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


class Staging:
    def stage(self, items):
        pass


class Sampler:
    def prepare(self):
        pass

    def run(self):
        pass


class Runner(FakeRunner):
    """A FakeRunner with the parts of a GpuRunner that are timed. Steps of more than 20 tokens are eager."""

    def attach(self):
        self._staging, self._sampler, self._stream, self.captured = Staging(), Sampler(), None, set()

    def graph_bytes(self):
        return [0] * len(self.captured)

    def _replay(self, items):
        self._staging.stage(items)
        count = sum(item.end - item.start for item in items)
        if count > 20:
            return None
        self.captured.add(count > len(items))
        return True

    def launch(self, items, *args, **more):
        self._replay(items)
        self._sampler.prepare()
        return super().launch(items, *args, **more)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = fake_engine(max_num_batched_tokens=64, max_model_len=128)
    engine._runner.__class__ = Runner
    engine._runner.attach()
    return engine


def test_steps_are_told_apart_and_the_engine_is_left_as_it_was(engine):
    parts = [engine, engine.scheduler, engine._steps, engine._runner, engine._runner._staging, engine._runner._sampler]
    before = [dict(vars(part)) for part in parts]
    tracer = Tracer(SimpleNamespace(engine=engine))
    prompts = [[1] * 30, [2] * 5]
    requests = [engine.add_request(prompts[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))]
    engine.step()
    requests.append(engine.add_request(prompts[1], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    run_all(engine)
    tracer.finish()
    tracer.close()
    assert [r.outputs[0].seq.output_ids for r in requests] == [expected(prompt, 6) for prompt in prompts]
    kinds = [step.kind for step in tracer.steps]
    assert kinds[:3] == ["eager", "capture", "capture"], "30 tokens, then 6, then 2"
    assert set(kinds[3:]) == {"decode"}
    found = summary(tracer.steps)
    assert found["eager"]["tokens"] == 30
    assert found["eager"]["prefills"] == 1
    assert found["decode"]["sequences"] <= 2
    assert all(found["decode"][part] >= 0 for part in HOST_PARTS)
    assert found["decode"]["schedule"] > 0
    assert found["decode"]["items"] > 0
    for part, own in zip(parts, before, strict=True):
        assert {k for k, v in vars(part).items() if callable(v)} == {k for k, v in own.items() if callable(v)}

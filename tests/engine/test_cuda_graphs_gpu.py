"""Graphs of steps: the first step of a shape runs as it is, later ones by its graph, with the inputs of their own."""

import gc

import pytest
import torch

from qengine.engine.cuda_graphs import StepGraphs
from qengine.engine.device_inputs import DeviceInputs, InputShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [InputShape(8, 8, 0, 1), InputShape(64, 4, 4, 1), InputShape(16, 16, 0, 1)]


class Steps:
    """Logits that follow from the ids alone. full: so many times there is no memory for a capture."""

    def __init__(self, full=0):
        self.table = torch.randn(100, 512, dtype=torch.float16, device="cuda")
        self.calls = 0
        self.full = full
        self.stream = torch.cuda.Stream()
        self.graphs = StepGraphs(
            self.forward,
            largest=SHAPES[1],
            device=torch.device("cuda"),
            stream=self.stream,
            pool=torch.cuda.MemPool(),
        )

    def forward(self, inputs):
        self.calls += 1
        assert not gc.isenabled(), "a graph or pool that is collected now ends the process"
        if self.full and torch.cuda.is_current_stream_capturing():
            self.full -= 1
            raise torch.cuda.OutOfMemoryError
        return (self.table[inputs.ids] @ self.table.T)[:, :32]

    def run(self, shape, seed):
        with torch.cuda.stream(self.stream), torch.inference_mode():
            ids = torch.arange(shape.tokens, device="cuda") * seed % 100
            DeviceInputs.over(self.graphs.buffer, shape).ids.copy_(ids)
            got = self.graphs.replay(shape).clone()
        torch.cuda.synchronize()
        return got, (self.table[ids] @ self.table.T)[:, :32]


def test_every_step_sees_its_own_inputs():
    steps = Steps()
    for seed in range(1, 8):
        for shape in SHAPES:
            got, expected = steps.run(shape, seed)
            assert torch.equal(got, expected), (seed, shape)
    assert steps.calls == 2 * len(SHAPES), "each shape runs once and is captured once"
    assert len(steps.graphs.graph_bytes()) == len(SHAPES)


def test_a_capture_without_memory_is_tried_once_more():
    steps = Steps(full=1)
    for seed in (3, 5):
        got, expected = steps.run(SHAPES[0], seed)
        assert torch.equal(got, expected)
    assert steps.calls == 3


def test_a_step_without_memory_for_its_graph_is_computed_all_the_same(caplog):
    steps = Steps(full=2)
    for seed in (3, 5):
        got, expected = steps.run(SHAPES[0], seed)
        assert torch.equal(got, expected)
    assert steps.calls == 5, "run, captured twice in vain and run again; then run"
    assert "no memory for the graph of 8 tokens" in caplog.text

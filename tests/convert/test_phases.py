"""Phases of a conversion, and the thread that writes beside it."""

import threading
import time

import pytest
import torch
from tiny_convert import convertible, quick_convert

from qengine.convert.behind import Behind
from qengine.convert.phases import PhaseClock, phase
from qengine.convert.runner import twin
from qengine.models import load_layer, model_spec
from qengine.quant import open_weights


def test_inner_phases_count_for_themselves():
    clock = PhaseClock()
    with phase("before"), clock.recording(), phase("outer"):
        time.sleep(0.02)
        for _ in range(2):
            with phase("inner"):
                time.sleep(0.05)
    with phase("after"):
        pass
    assert list(clock.costs) == ["other", "outer", "inner"]
    assert [cost.count for cost in clock.costs.values()] == [1, 1, 2]
    assert clock.costs["inner"].seconds >= 0.1
    assert 0.02 <= clock.costs["outer"].seconds < 0.1
    assert clock.costs["other"].seconds < 0.02


def test_other_threads_are_not_counted():
    clock = PhaseClock()
    with clock.recording():
        thread = threading.Thread(target=lambda: phase("elsewhere").__enter__())
        thread.start()
        thread.join()
    assert list(clock.costs) == ["other"]


def test_phases_of_a_conversion(tmp_path, text_file):
    _, folder = convertible()
    quick_convert(folder, tmp_path / "plain", text_file, method="gptq")
    clock = PhaseClock()
    with clock.recording():
        report = quick_convert(folder, tmp_path / "out", text_file, method="gptq")
    expected = {
        "calibration text",
        "reading",
        "forward",
        "moments",
        "target",
        "rounding",
        "errors",
        "packing",
        "shards",
    }
    assert expected | {"gptq: factor", "gptq: grids", "gptq: columns", "wait for writing"} <= set(clock.costs)
    assert sum(cost.seconds for name, cost in clock.costs.items() if "beside" not in name) <= report.seconds + 0.5
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "plain" / n).read_bytes() for n in names)


def test_an_error_behind_comes_out_once_and_none_outlives():
    done = []

    def slow():
        time.sleep(0.05)
        done.append(1)

    def failing():
        raise OSError("disk")

    with Behind("writing") as behind:
        behind.start(failing)
        with pytest.raises(OSError, match="disk"):
            behind.wait()
        behind.wait()
        behind.start(slow)
    assert done == [1]


def test_reading_ahead_names_the_layers_bytes():
    from qengine.checkpoint import open_checkpoint
    from qengine.convert.readahead import read_ahead

    _, folder = convertible(num_hidden_layers=2)
    checkpoint = open_checkpoint(folder)
    expected = sum(info.nbytes for name, info in checkpoint.tensors.items() if ".layers.1." in name)
    assert read_ahead(checkpoint, "model.layers.1.") == expected > 0
    assert read_ahead(checkpoint, "model.layers.2.") == 0


@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen2", "phi3"])
def test_a_twin_shares_weights_until_one_is_set(family):
    from qengine.checkpoint import open_checkpoint

    _, folder = convertible(family)
    checkpoint = open_checkpoint(folder)
    source = open_weights(checkpoint)
    layer = load_layer(source, model_spec(checkpoint), 0, dtype=torch.float32, device="cpu")
    other = twin(layer)
    for name, linear in layer.linears().items():
        mine = other.linears()[name]
        assert mine is not linear
        assert mine.dense_weight() is linear.dense_weight()
    name = next(iter(layer.linears()))
    first, second = layer.linears()[name], other.linears()[name]
    x = torch.randn(3, first.shape[1], generator=torch.Generator().manual_seed(0))
    before = first(x)
    assert torch.equal(second(x), before)
    second.observer = lambda x: None
    second.set_weight(torch.randn(first.shape, generator=torch.Generator().manual_seed(1)))
    assert first.observer is None
    assert torch.equal(first(x), before)
    assert not torch.allclose(second(x), before)


@pytest.mark.parametrize("bytes_at_once", [1 << 28, 4 * 96 * 48], ids=["on the way", "pass by pass"])
def test_rounding_is_never_done_by_rounded_products(bytes_at_once, tmp_path, text_file, monkeypatch):
    from contextlib import contextmanager

    from qengine.convert import layer_methods, precision, runner

    state, seen = ["highest"], {"stage": set(), "fold": set(), "layer": set()}

    @contextmanager
    def recorded(device, name):
        state.append(name)
        yield
        state.pop()

    def watched(kind, call):
        def wrapped(*args):
            seen[kind].add(state[-1])
            return call(*args)

        return wrapped

    monkeypatch.setattr(precision, "_precision", recorded)
    monkeypatch.setitem(runner.BATCH_BYTES, "cpu", bytes_at_once)
    monkeypatch.setattr(layer_methods, "quantize_stage", watched("stage", layer_methods.quantize_stage))
    monkeypatch.setattr(layer_methods, "apply_folds", watched("fold", layer_methods.apply_folds))
    monkeypatch.setattr(runner, "DenseContext", watched("layer", runner.DenseContext))
    _, folder = convertible()
    quick_convert(folder, tmp_path / "out", text_file, method="best")
    assert seen == {"stage": {"highest"}, "fold": {"highest"}, "layer": {"high"}}

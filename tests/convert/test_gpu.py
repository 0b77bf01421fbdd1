"""Conversions on a GPU: the same bytes whole and resumed, wherever the states lie; near to the CPU's."""

import pytest
import torch
from tiny_convert import Stop, contents, convertible, quick_convert, stop_after

from qengine.convert import runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("method", ["awq", "gptq", "best"])
@pytest.mark.parametrize("places", [["device", "device"], ["device", "memory"], ["memory", "file"]], ids="-".join)
def test_the_same_bytes_whole_and_resumed(method, places, tmp_path, text_file, monkeypatch):
    _, folder = convertible("llama3", num_hidden_layers=3)
    options = {"method": method, "device": "cuda"}
    monkeypatch.setitem(runner.BATCH_BYTES, "cuda", 4 * 96 * 48)  # a window a batch
    quick_convert(folder, tmp_path / "whole", text_file, **options)
    monkeypatch.setattr("qengine.convert.converter.fitting", lambda shape, device, count: places)
    for layers in (1, 2):
        with pytest.raises(Stop):
            quick_convert(folder, tmp_path / "out", text_file, resume=True, progress=stop_after(layers), **options)
    quick_convert(folder, tmp_path / "out", text_file, resume=True, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_errors_are_those_of_the_cpu(method, tmp_path, text_file):
    _, folder = convertible("llama3")
    cpu, gpu = (
        quick_convert(folder, tmp_path / device, text_file, method=method, device=device) for device in ("cpu", "cuda")
    )
    # other last bits choose another scale or code here and there, which moves single linears by more than their mean
    errors = [sum(record.error for record in report.layers) for report in (cpu, gpu)]
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    assert gpu.layer_errors == pytest.approx(cpu.layer_errors, rel=0.15)

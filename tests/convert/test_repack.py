"""From every format that others write to every format that is written here: equal weights, or a reason."""

import json

import pytest
import torch
from tiny_convert import convertible, quick_convert
from vectors import vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.convert.run import convert_checkpoint
from qengine.errors import UnsupportedError
from qengine.quant import open_weights

FORMATS = ("awq-gemm", "gptq", "gptq_v2", "compressed-tensors")
# name, format -> what the refusal says
REFUSED = {
    ("gptqmodel-awq-gemm-w8-g64", "awq-gemm"): "4 bits, this layer has 8",
    ("gptqmodel-gptq-w8-g64-sym", "awq-gemm"): "4 bits, this layer has 8",
    ("gptqmodel-gptq-w3-g32-sym", "awq-gemm"): "4 bits, this layer has 3",
    ("llmc-rtn-w3a16-g32", "awq-gemm"): "4 bits, this layer has 3",
    ("llmc-old090-rtn-w3a16-g32-naive", "awq-gemm"): "4 bits, this layer has 3",
    ("gptqmodel-gptq-w4-g64-sym-descact", "awq-gemm"): "act-order",
    ("gptqmodel-gptq-w4-g64-sym-descact", "compressed-tensors"): "act-order",
    ("gptqmodel-gptq-w4-g128-sym-h256", "awq-gemm"): "act-order",
    ("gptqmodel-gptq-w4-g128-sym-h256", "compressed-tensors"): "act-order",
    ("gptqmodel-gptq-w4-g64-lmhead", "awq-gemm"): "4 bits, this layer has 8",
}
ANY_REASON = {"gptqmodel-gptq-w4-g256-ragged", "gptqmodel-gptq-dynamic"}


def same_weights(before, after):
    a, b = open_weights(open_checkpoint(before)), open_weights(open_checkpoint(after))
    b.check()
    assert sorted(a.quantized_modules()) == sorted(b.quantized_modules())
    for name in a.quantized_modules():
        assert torch.equal(a.linear(name).dequantize(), b.linear(name).dequantize()), name
        assert a.linear(name).spec.bits == b.linear(name).spec.bits
    for name in a.plain_tensors():
        assert torch.equal(a.tensor(name), b.tensor(name)), name


@pytest.mark.parametrize("name", vector_names())
def test_vectors(name, tmp_path):
    for format in FORMATS:
        words = REFUSED.get((name, format))
        try:
            convert_checkpoint(vector_path(name), tmp_path / format, format=format)
        except UnsupportedError as error:
            text = str(error)
            zero = format == "gptq" and "zero points of 0" in text
            assert zero or name in ANY_REASON or (words and words in text), text
            assert "model.layers." in text or "lm_head" in text
            assert "qengine dequantize" in text
            assert not (tmp_path / format).exists()
            continue
        assert words is None, f"{format} was not refused"
        same_weights(vector_path(name), tmp_path / format)


def test_there_and_back_is_the_same_file(tmp_path, text_file):
    _, folder = convertible("qwen2", num_hidden_layers=2)
    quick_convert(folder, tmp_path / "a", text_file, method="awq", format="awq-gemm")
    convert_checkpoint(tmp_path / "a", tmp_path / "ct", format="compressed-tensors")
    convert_checkpoint(tmp_path / "ct", tmp_path / "v2", format="gptq_v2")
    convert_checkpoint(tmp_path / "v2", tmp_path / "b", format="awq-gemm")
    same_weights(tmp_path / "a", tmp_path / "b")
    a, b = (open_checkpoint(tmp_path / run) for run in "ab")
    assert sorted(a.tensors) == sorted(b.tensors)
    assert all(torch.equal(a.tensors.load(name), b.tensors.load(name)) for name in a.tensors)
    assert a.config["quantization_config"] == b.config["quantization_config"]
    assert json.loads((tmp_path / "v2" / "config.json").read_text())["quantization_config"]["desc_act"] is False

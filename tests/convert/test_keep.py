"""Other bits for some modules, and a quantized output head."""

import json

import pytest
import torch
from tiny_convert import convertible, quick_convert
from tiny_models import dense_logits, load

from qengine.checkpoint import open_checkpoint
from qengine.errors import ConfigError
from qengine.quant import open_weights

IDS = torch.randint(3, 290, (24,), generator=torch.Generator().manual_seed(1))
KEEP = {"down_proj": 8, r"layers\.0\.self_attn\.v": 3, "lm_head": 8, "gate_proj": 16}


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "compressed-tensors"])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])  # an own head, a tied one
def test_each_module_has_its_bits(family, format, tmp_path, text_file):
    _, folder = convertible(family, num_hidden_layers=2)
    before = dense_logits(load(folder), IDS)
    report = quick_convert(folder, tmp_path / "out", text_file, method="gptq", format=format, keep=KEEP)
    source = open_weights(open_checkpoint(tmp_path / "out"))
    source.check()
    for layer in range(2):
        start = f"model.layers.{layer}."
        bits = {name: source.linear_spec(f"{start}{name}") for name in ("self_attn.v_proj", "mlp.down_proj")}
        assert bits["mlp.down_proj"].bits == 8
        assert bits["self_attn.v_proj"].bits == (4 if layer else 3)
        assert source.linear_spec(f"{start}mlp.gate_proj") is None
        assert source.linear_spec(f"{start}mlp.up_proj").bits == 4
    assert source.linear_spec("lm_head").bits == 8
    head = next(record for record in report.layers if record.name == "lm_head")
    assert head.bits == 8
    assert head.error < 1e-3
    dense = open_weights(open_checkpoint(folder))
    name = "lm_head" if dense.has_linear("lm_head") else "model.embed_tokens"
    weight = dense.linear(name).weight.float()
    assert (source.linear("lm_head").dequantize() - weight).norm() < 0.1 * weight.norm()
    after = dense_logits(load(tmp_path / "out"), IDS)
    assert float((after - before).norm() / before.norm()) < 0.5


def test_awq_leaves_modules_as_they_are(tmp_path, text_file):
    _, folder = convertible(num_hidden_layers=2)
    quick_convert(folder, tmp_path / "out", text_file, keep={"o_proj": 16})
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.self_attn.o_proj" in config["modules_to_not_convert"]
    source = open_weights(open_checkpoint(tmp_path / "out"))
    assert source.linear_spec("model.layers.1.self_attn.o_proj") is None
    assert source.linear_spec("model.layers.1.mlp.up_proj").bits == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": {"down": 8}}, "--keep down=8 is not allowed with --format awq-gemm; allowed are 4, 16"),
        ({"keep": {"lm_head": 4}}, "no reader of awq-gemm knows a quantized lm_head"),
        ({"method": "gptq", "keep": {"(": 8}}, "is no regular expression"),
        ({"method": "gptq", "keep": {"up": 5}}, "allowed are 2, 3, 4, 8, 16"),
    ],
)
def test_refusals(options, words):
    from qengine.convert.settings import resolve_settings

    with pytest.raises(ConfigError) as error:
        resolve_settings(**options)
    assert words in str(error.value)

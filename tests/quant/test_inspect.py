"""`qengine inspect`: complete as JSON, compact as a table, and it explains what it refuses."""

import json
import shutil

import pytest
import slow_formats as slow
import torch
import typer
from typer.testing import CliRunner
from vectors import vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.cli.inspect import inspect
from qengine.quant import open_weights
from qengine.quant.summary import summarize

APP = typer.Typer()
APP.command()(inspect)


def run(*arguments):
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", vector_names())
def test_summary_agrees_with_the_weights(name):
    checkpoint = open_checkpoint(vector_path(name))
    source = open_weights(checkpoint)
    summary = json.loads(json.dumps(summarize(source)))
    assert summary["servable"] is True
    assert summary["reason"] is None
    assert summary["method"] == source.method
    quantized = [layer for layer in summary["layers"] if layer["quantized"]]
    assert {layer["name"] for layer in quantized} == set(source.quantized_modules())
    for layer in summary["layers"]:
        weight = source.linear(layer["name"])
        shape = weight.shape if layer["quantized"] else weight.weight.shape
        assert layer["shape"] == list(shape)
        assert layer["bias"] == (weight.bias is not None)
        if layer["quantized"]:
            spec = weight.spec
            seen = [layer[key] for key in ("bits", "group_size", "sym", "act_order", "format")]
            assert seen == [spec.bits, spec.group_size, spec.sym, spec.desc_act, spec.format]
    total = sum(part["bytes"] for part in summary["layers"] + summary["tensors"])
    assert total == summary["totals"]["tensor_bytes"] == checkpoint.tensors.nbytes
    assert summary["totals"]["disk_bytes"] == (vector_path(name) / "model.safetensors").stat().st_size
    assert summary["totals"]["quantized_bits_per_weight"] > quantized[0]["bits"] - 2


def test_numbers_of_a_known_checkpoint():
    summary = summarize(open_weights(open_checkpoint(vector_path("gptqmodel-gptq-dynamic"))))
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["writer"] == "gptqmodel:7.7.0"
    down = next(layer for layer in summary["layers"] if layer["name"] == "model.layers.1.mlp.down_proj")
    assert (down["shape"], down["bits"], down["group_size"]) == ([128, 384], 8, 32)
    attention = 2 * 128 * 128 + 2 * 64 * 128
    parameters = 2 * (attention + 3 * 128 * 384 + 2 * 128) + 2 * 320 * 128 + 128
    assert summary["totals"]["parameters"] == parameters
    assert summary["totals"]["bits_per_weight"] == round(8 * summary["totals"]["tensor_bytes"] / parameters, 3)


def test_json_on_the_command_line():
    assert json.loads(run(vector_path("autoawq-gemv-g128"), "--json"))["format"] == "gemv"


def test_table_puts_equal_layers_together():
    text = run(vector_path("gptqmodel-gptq-w4-g64-sym-descact"))
    rows = [line.split() for line in text.splitlines()]
    assert ["model.layers.*.mlp.down_proj", "2", "128", "x", "384", "4", "64", "yes", "yes", "gptq", "0.06"] in rows
    assert not any("layers.0" in line for line in text.splitlines())
    assert "14 of 16 matrices quantized" in text
    assert "gptqmodel:7.7.0" in text


def test_what_cannot_be_served_is_still_described(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.B": torch.zeros(4, 8, dtype=torch.int32), "model.norm.weight": torch.ones(4)}
    folder = slow.write_checkpoint(tmp_path, tensors, {"quant_method": "marlin", "bits": 4, "group_size": 128})
    summary = json.loads(run(folder, "--json"))
    assert summary["servable"] is False
    assert "model.layers.0.mlp.up_proj: format 'marlin' cannot be served" in summary["reason"]
    assert summary["layers"][0]["shape"] is None
    assert summary["totals"]["parameters"] is None
    text = run(folder)
    assert "cannot be served" in text
    assert "marlin" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": {"a": 1}}, "architectures is"),
        ({"architectures": 5}, "architectures is 5"),
        ({"hidden_size": 64}, "q_proj: its weight is"),
    ],
)
def test_weights_that_make_no_servable_model_are_not_called_servable(tmp_path, changes, words):
    shutil.copytree(vector_path("autoawq-gemm-g64"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    summary = json.loads(run(tmp_path, "--json"))
    assert summary["servable"] is False
    assert words in summary["reason"]
    assert json.loads(run(vector_path("autoawq-gemm-g64"), "--json"))["servable"] is True

"""`qengine dequantize` writes a plain folder that transformers loads, with the values of the quantized one."""

import json
import shutil

import pytest
import slow_formats as slow
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner
from vectors import float32_digest, vector_expected, vector_logits, vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.cli.dequantize import dequantize
from qengine.errors import CheckpointError, ConfigError, UnsupportedError
from qengine.quant.export import dequantize_checkpoint

APP = typer.Typer()
APP.command()(dequantize)


def run(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", vector_names())
def test_values_are_kept_exactly(name, tmp_path):
    dequantize_checkpoint(open_checkpoint(vector_path(name)), tmp_path / "out")
    plain, stored = open_checkpoint(tmp_path / "out"), open_checkpoint(vector_path(name))
    assert "quantization_config" not in plain.config
    assert plain.config["dtype"] == "float32"
    for weight, entry in vector_expected(name).items():
        assert float32_digest(plain.tensors.load(weight)) == entry["sha256"], weight
    for tensor in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        if tensor in stored.tensors:
            assert torch.equal(plain.tensors.load(tensor), stored.tensors.load(tensor).float())
    assert not any(name.endswith(("qweight", "qzeros", "scales", "g_idx", "_packed")) for name in plain.tensors)
    assert plain.generation_config == stored.generation_config
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).exists() == (vector_path(name) / file).exists()


@pytest.mark.parametrize(
    "name",
    [
        "autoawq-gemm-g64",
        "gptqmodel-gptq-w4-g64-lmhead",
        "gptqmodel-gptq-w4-g64-sym-qwen2-bias-tied",
        "gptqmodel-gptq-w4-g128-sym-h256",
        "llmc-old090-rtn-w3a16-g32-naive",
    ],
)
def test_transformers_loads_it_and_gives_the_librarys_logits(name, tmp_path):
    from transformers import AutoModelForCausalLM

    result = run(vector_path(name), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    input_ids, expected = vector_logits(name)
    with torch.no_grad():
        logits = model(input_ids).logits
    # The libraries computed theirs in float16.
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(tmp_path, dtype):
    name = "autoround-awq-sym-g64"
    assert run(vector_path(name), "--out", tmp_path / "half", "--dtype", dtype).exit_code == 0
    assert run(vector_path(name), "--out", tmp_path / "full").exit_code == 0
    half, full = open_checkpoint(tmp_path / "half"), open_checkpoint(tmp_path / "full")
    assert half.config["dtype"] == dtype
    for weight in full.tensors:
        assert torch.equal(half.tensors.load(weight), full.tensors.load(weight).to(getattr(torch, dtype)))


def test_shards_and_their_index(tmp_path):
    checkpoint = open_checkpoint(vector_path("autoawq-gemm-g64"))
    steps = []
    dequantize_checkpoint(
        checkpoint, tmp_path / "many", shard_bytes=300_000, progress=lambda done, total: steps.append((done, total))
    )
    dequantize_checkpoint(checkpoint, tmp_path / "one")
    many, one = open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one")
    assert len(many.tensors.files) > 3
    assert all(file.stat().st_size < 310_000 for file in many.tensors.files)
    assert set(many.tensors) == set(one.tensors)
    assert all(torch.equal(many.tensors.load(name), one.tensors.load(name)) for name in one.tensors)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == many.tensors.nbytes
    assert steps == [(i + 1, len(one.tensors)) for i in range(len(one.tensors))]


def test_text_config_is_cleaned_too(tmp_path):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    tensors = slow.prefixed("model.layers.0.mlp.up_proj", slow.awq_gemm_tensors(q, z, s, 4))
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    text = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": quant}
    folder = slow.write_checkpoint(tmp_path / "in", tensors, config={"text_config": text, "torch_dtype": "float16"})
    dequantize_checkpoint(open_checkpoint(folder), tmp_path / "out", dtype="bfloat16")
    config = open_checkpoint(tmp_path / "out").config
    assert config["text_config"] == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("with_embedding", [True, False])
def test_tied_models_with_a_quantized_head(tmp_path, with_embedding):
    q, z, s = slow.random_layer(96, 64, 2, 4)
    head = slow.gptq_tensors(q, z, s, 4, g_idx=[k // 32 for k in range(64)], v2=True)
    tensors = slow.prefixed("lm_head", head) | {"model.layers.0.input_layernorm.weight": torch.ones(64)}
    if with_embedding:
        tensors["model.embed_tokens.weight"] = torch.randn(96, 64)
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2", "lm_head": True}
    folder = slow.write_checkpoint(tmp_path / "in", tensors, quant, config={"tie_word_embeddings": True})
    dequantize_checkpoint(open_checkpoint(folder), tmp_path / "out")
    plain = open_checkpoint(tmp_path / "out")
    expected = slow.dequantized(q, z, s, [k // 32 for k in range(64)])
    # A head of its own is kept by untying it; a shared one is stored once, as the embedding.
    assert plain.config["tie_word_embeddings"] is not with_embedding
    assert ("lm_head.weight" in plain.tensors) is with_embedding
    name = "lm_head.weight" if with_embedding else "model.embed_tokens.weight"
    assert torch.equal(plain.tensors.load(name), expected)


def test_folders_are_not_overwritten(tmp_path):
    checkpoint = open_checkpoint(vector_path("autoawq-gemm-g64"))
    out = tmp_path / "out"
    out.mkdir()
    dequantize_checkpoint(checkpoint, out)  # an empty one is fine
    with pytest.raises(ConfigError, match="--force"):
        dequantize_checkpoint(checkpoint, out)
    (out / "stale").write_text("x")
    dequantize_checkpoint(checkpoint, out, force=True)
    assert not (out / "stale").exists()
    with pytest.raises(ConfigError, match="the checkpoint itself"):
        dequantize_checkpoint(open_checkpoint(out), out, force=True)
    with pytest.raises(ConfigError, match=r"dtype='int8'.*float32, float16, bfloat16"):
        dequantize_checkpoint(checkpoint, tmp_path / "other", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_values_beyond_float16(tmp_path):
    folder = tmp_path / "in"
    slow.write_checkpoint(folder, {"model.norm.weight": torch.full((4,), 1e6)})
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*1e\+06.*bfloat16"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_refused_before_anything_is_written(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.B": torch.zeros(4, 8, dtype=torch.int32)}
    folder = slow.write_checkpoint(tmp_path / "in", tensors, {"quant_method": "marlin"})
    with pytest.raises(UnsupportedError, match="marlin"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_layer_that_fails_half_way_leaves_nothing(tmp_path):
    tensors = slow.awq_gemm_tensors(*slow.random_layer(32, 64, 2, 4), 4)
    tensors["scales"][0, 0] = float("nan")
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    folder = slow.write_checkpoint(tmp_path / "in", slow.prefixed("model.layers.0.mlp.up_proj", tensors), quant)
    with pytest.raises(CheckpointError, match="inf or NaN"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_integer_tensors_stay_as_they_are(tmp_path):
    slow.write_checkpoint(tmp_path / "in", {"a.weight": torch.randn(2, 2).half()})
    save_file(
        {"a.weight": torch.randn(2, 2).half(), "position_ids": torch.arange(4)}, tmp_path / "in/model.safetensors"
    )
    dequantize_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "out", dtype="bfloat16")
    assert torch.equal(open_checkpoint(tmp_path / "out").tensors.load("position_ids"), torch.arange(4))


@pytest.mark.parametrize("inside", [".", "model"])
def test_force_never_replaces_the_checkpoint_or_a_folder_around_it(tmp_path, inside):
    folder = tmp_path / inside
    shutil.copytree(vector_path("autoawq-gemm-g64"), folder, dirs_exist_ok=True)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="the checkpoint itself"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path, force=True)
    assert (folder / "model.safetensors").read_bytes() == before

"""Random checkpoints: the same every time, of the shapes they claim, servable, with weights of the right size."""

import pytest
import torch

from qengine.checkpoint import open_checkpoint
from qengine.errors import ConfigError
from qengine.models import load_model, model_spec
from qengine.models.loading import check_weights
from qengine.quant import open_weights
from qengine.random_model import SHAPES, main, random_checkpoint, shape_config, tensor_entries, write_random_model


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_can_be_served(name):
    ckpt = random_checkpoint(f"random:{name}", "cpu")
    source = open_weights(ckpt)
    source.check()
    spec = model_spec(ckpt)
    check_weights(source, spec)
    assert source.method == "awq"
    assert len(source.quantized_modules()) == 7 * spec.num_layers


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-3.1-8b", 8.030), ("qwen2.5-7b", 7.616), ("mistral-7b", 7.248), ("qwen3-8b", 8.191)],
)
def test_sizes_are_those_of_the_real_models(name, billions):
    """Parameters as the models' cards state them."""
    count = 0
    for entry in tensor_entries(shape_config(name)):
        numbers = entry.nbytes // entry.dtype.itemsize
        if entry.name.endswith("qweight"):
            count += 8 * numbers
        elif not entry.name.endswith(("qzeros", "scales")):
            count += numbers
    assert count / 1e9 == pytest.approx(billions, abs=0.002)


def test_written_and_made_in_memory_are_the_same(tmp_path):
    write_random_model("tiny", tmp_path / "m")
    written, made = open_checkpoint(tmp_path / "m"), random_checkpoint("tiny", "cpu")
    assert written.config == made.config
    assert list(written.tensors) == list(made.tensors)
    for name in written.tensors:
        assert torch.equal(written.tensors.load(name), made.tensors.load(name))
    other = random_checkpoint("tiny", "cpu", seed=1).tensors
    assert not torch.equal(other.load("model.embed_tokens.weight"), made.tensors.load("model.embed_tokens.weight"))
    layers = [made.tensors.load(f"model.layers.{i}.mlp.up_proj.qweight") for i in range(2)]
    assert not torch.equal(*layers)


def test_weights_have_the_spread_of_trained_ones():
    source = open_weights(random_checkpoint("tiny", "cpu"))
    weight = source.linear("model.layers.0.mlp.down_proj")
    assert set(weight.zeros.unique().tolist()) == {7, 8}
    values = weight.dequantize(torch.float32)
    assert float(values.std()) * values.shape[1] ** 0.5 == pytest.approx(1.05, abs=0.1)
    assert abs(float(values.mean())) < 0.01


def test_logits_are_finite_in_float16():
    model = load_model(random_checkpoint("tiny", "cpu"), dtype=torch.float32, device="cpu")
    from tiny_models import dense_logits

    logits = dense_logits(model, torch.arange(64) * 7)
    assert bool(torch.isfinite(logits.half()).all())
    assert float(logits.std()) > 0.1


def test_the_command(tmp_path, capsys):
    assert main(["tiny", str(tmp_path / "m"), "--device", "cpu"]) == 0
    assert (tmp_path / "m" / "config.json").is_file()
    assert main(["tiny", str(tmp_path / "m"), "--device", "cpu"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["nothing", str(tmp_path / "n")]) == 2
    assert main(["--list"]) == 0
    assert "llama-2-7b       3.62 GiB" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'qwen3-8b'"):
        shape_config("qwen3-8")

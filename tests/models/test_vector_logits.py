"""Checkpoints that other libraries wrote give the logits that those libraries computed from them.

They computed in float16 on a CPU, we in float32 from the same weights, so the difference is their rounding: each of
some twenty roundings between embedding and logits (two layers) is uniform within 2^-11 of a value of the size of
the logits' spread s, a standard deviation of 2^-11 / sqrt(3), which makes sqrt(20) * 2^-11 / sqrt(3) * s = 1.3e-3 s
together. Measured: mean absolute error 1.0e-3 to 1.5e-3 s, largest of 16,000 values 1.6e-2 s at most. A code of one
weight matrix that is off by one step shows tenfold (the last test).
"""

import json

import pytest
import torch
from tiny_models import dense_logits, load
from vectors import vector_logits, vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.models import load_model

MEAN = 2e-3
LARGEST = 2e-2

WITH_LOGITS = [name for name in vector_names() if vector_logits(name) is not None]


def _errors(model, ids, expected):
    difference = (dense_logits(model, ids[0]) - expected[0]).abs() / expected.std()
    return difference.mean().item(), difference.max().item()


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_logits(name):
    ids, expected = vector_logits(name)
    mean, largest = _errors(load(vector_path(name)), ids, expected)
    assert mean < MEAN
    assert largest < LARGEST


def test_most_vectors_have_logits():
    assert len(WITH_LOGITS) >= 27


def test_a_tied_config_with_a_quantized_head_uses_that_head(tmp_path):
    source = vector_path("gptqmodel-gptq-w4-g64-lmhead")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ids, expected = vector_logits("gptqmodel-gptq-w4-g64-lmhead")
    model = load(tmp_path)
    assert model.spec.tied_head
    mean, largest = _errors(model, ids, expected)
    assert mean < MEAN
    assert largest < LARGEST


def test_bfloat16_uses_the_int4_kernel_and_stays_near():
    name = "gptqmodel-gptq-w4-g64-sym-descact"
    ids, expected = vector_logits(name)
    model = load_model(open_checkpoint(vector_path(name)), dtype=torch.bfloat16, device="cpu")
    assert any("INT4" in words and "act-order" in words for words in model.describe())
    mean, largest = _errors(model, ids, expected)
    assert mean < 16 * MEAN  # 8 bits instead of 11 in all roundings, and in the scales
    assert largest < 16 * LARGEST


def test_the_tolerance_sees_one_step_in_one_matrix(monkeypatch):
    from qengine.quant import QuantizedWeight, WeightSource

    original = WeightSource.linear

    def shifted(self, name, device=None):
        weight = original(self, name, device)
        if name == "model.layers.1.mlp.down_proj":
            assert isinstance(weight, QuantizedWeight)
            weight.zeros = weight.zeros + 1
        return weight

    ids, expected = vector_logits("gptqmodel-gptq-w4-g64-sym")
    monkeypatch.setattr(WeightSource, "linear", shifted)
    mean, largest = _errors(load(vector_path("gptqmodel-gptq-w4-g64-sym")), ids, expected)
    assert mean > 5 * MEAN
    assert largest > 5 * LARGEST

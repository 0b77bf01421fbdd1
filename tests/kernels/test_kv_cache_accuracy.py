"""What a quantized cache costs the demo model in perplexity, on a few windows of the bundled text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import load, tiny

from qengine.engine.key_axes import key_axes
from qengine.layers.attention import DenseContext

ROOT = Path(__file__).resolve().parents[2]


def test_int8_and_int4_change_perplexity_little(smollm2):
    script = [str(ROOT / "benchmarks" / "kv_accuracy.py"), "--model", str(smollm2), "--json", "--windows", "3"]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, *script, "--kinds", "int8", "int4"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = json.loads(done.stdout)["kinds"]
    assert 20 < kinds["float32"]["perplexity"] < 80
    assert abs(kinds["int8"]["change"]) < 0.3
    assert 0.2 < kinds["int4"]["change"] < 3.0, "4 bits are felt, or they were not used"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_axes_are_where_the_keys_energy_is(family):
    model = load(tiny(family)[1])
    axes = key_axes(model)
    spec = model.spec
    assert axes.shape == (spec.num_layers, spec.num_kv_heads)
    assert axes.dtype == torch.int32
    assert torch.equal(axes, key_axes(model)), "the same model has the same axes"
    # make one pair of one head's keys large: its axis moves there, in whatever position
    wanted = spec.head_dim // 2 - 1
    seen = {}

    class Louder(DenseContext):
        def attend(self, layer_index, q, k, v, **options):
            seen[layer_index] = k
            return super().attend(layer_index, q, k, v, **options)

    ids = torch.arange(20) % spec.vocab_size
    model.forward(ids, torch.arange(20), Louder(1, 20))
    energy = seen[1].square().mean(0).unflatten(-1, (2, -1)).sum(-2)
    assert energy.shape == (spec.num_kv_heads, spec.head_dim // 2)
    assert ((axes >= 0) & (axes < wanted + 1)).all()

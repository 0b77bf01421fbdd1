"""What a quantized cache costs the demo model in perplexity, on a few windows of the bundled text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tiny_models import load, save, tiny

from qengine.engine.key_axes import key_axes

ROOT = Path(__file__).resolve().parents[2]


def test_int8_and_int4_change_perplexity_little(smollm2):
    script = [str(ROOT / "benchmarks" / "kv_accuracy.py"), "--model", str(smollm2), "--json", "--windows", "2"]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, *script, "--kinds", "int8", "int4"], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = json.loads(done.stdout)["kinds"]
    assert 20 < kinds["float32"]["perplexity"] < 80
    assert abs(kinds["int8"]["change"]) < 0.3
    assert 0.2 < kinds["int4"]["change"] < 3.0, "4 bits are felt, or they were not used"
    assert kinds["int4"]["change"] < kinds["int4, one key offset"]["change"] < 6.0


def test_the_axis_is_the_pair_that_a_model_makes_large():
    source, _ = tiny("llama1")
    config = source.config
    size, pairs = config.head_dim, torch.randint(0, config.head_dim // 2, (config.num_hidden_layers, 4))
    with torch.no_grad():
        for layer, row in zip(source.model.layers, pairs, strict=True):
            heads = layer.self_attn.k_proj.weight.view(4, 2, size // 2, -1)
            for head, pair in enumerate(row):
                heads[head, :, pair] *= 20
    model = load(save(source))
    axes = key_axes(model)
    assert axes.dtype == torch.int32
    assert torch.equal(axes.long(), pairs)
    assert torch.equal(axes, key_axes(model)), "the same model has the same axes"

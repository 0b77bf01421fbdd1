"""Loading folds down_proj's act-order into gate and up: the same logits, and no permutation left on down_proj."""

import pytest
import torch
from tiny_models import dense_logits
from vectors import vector_logits, vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.kernels.w4a16 import W4A16Weight
from qengine.models import load_model, loading
from qengine.quant import QuantizedWeight, open_weights


def _has_order(name: str) -> bool:
    source = open_weights(open_checkpoint(vector_path(name)))
    weight = source.linear("model.layers.0.mlp.down_proj")
    return isinstance(weight, QuantizedWeight) and not torch.equal(
        weight.group_index(), torch.arange(weight.shape[1]) // weight.group_size
    )


ORDERED = [name for name in vector_names() if _has_order(name)]


def test_some_vectors_have_act_order():
    assert len(ORDERED) >= 2


def _load(name, monkeypatch, dtype, fold=True):
    """(model, the weights that its down_projs were made from)."""
    seen = {}

    class Seen(loading.Linear):
        def __init__(self, name, weight, **options):
            if name.endswith("down_proj"):
                seen[name] = weight
            super().__init__(name, weight, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "Linear", Seen)
        if not fold:
            patch.setattr(loading, "fold_order", lambda inputs, output: (list(inputs), output))
        model = load_model(open_checkpoint(vector_path(name)), dtype=dtype, device="cpu")
    assert len(seen) == model.spec.num_layers
    return model, seen


@pytest.mark.parametrize("name", ORDERED)
def test_logits_are_unchanged_and_down_proj_has_no_permutation(name, monkeypatch):
    ids = vector_logits(name)[0][0]
    folded, weights = _load(name, monkeypatch, torch.float32)
    plain, before = _load(name, monkeypatch, torch.float32, fold=False)
    a, b = dense_logits(folded, ids), dense_logits(plain, ids)
    torch.testing.assert_close(a, b, rtol=0, atol=float(b.std()) * 2e-5)  # sums in another order
    assert not torch.equal(a, b), "nothing was folded"
    for weight, old in zip(weights.values(), before.values(), strict=True):
        packed = [
            W4A16Weight.pack(w.q, w.scales, w.zeros, w.g_idx, w.spec.bits, w.spec.group_size, "cpu")
            for w in (weight, old)
        ]
        assert packed[0].perm is None
        assert packed[1].perm is not None


def test_the_cpus_int4_kernel_gathers_no_input_for_down_proj(monkeypatch):
    name = "gptqmodel-gptq-w4-g64-sym-descact"
    folded, _ = _load(name, monkeypatch, torch.bfloat16)
    plain, _ = _load(name, monkeypatch, torch.bfloat16, fold=False)
    for layer in range(folded.spec.num_layers):
        assert "gathered" not in folded.layers[layer].linears()["mlp.down_proj"].describe()
        assert "gathered" in plain.layers[layer].linears()["mlp.down_proj"].describe()

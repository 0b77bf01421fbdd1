"""Sliding windows: which layers have one, and prompts longer than it."""

import json

import pytest
import torch
from tiny_models import PagedRun, dense_logits, load, reference_logits, tiny


def test_4200_tokens_through_a_window_of_4096():
    fields = {"sliding_window": 4096, "max_position_embeddings": 8192, "num_hidden_layers": 2, "hidden_size": 32}
    reference, folder = tiny("mistral", head_dim=8, **fields)
    reference.set_attn_implementation("sdpa")
    model = load(folder)
    ids = torch.randint(3, 96, (4200,))
    expected = reference_logits(reference, ids)
    dense = dense_logits(model, ids)
    assert (dense - expected).abs().max() < 1e-4
    run = PagedRun(model, [4200], block_size=16)
    chunked = [run.step({0: part})[0] for part in (ids[:1000], ids[1000:4100], ids[4100:4199], ids[4199:])]
    assert (torch.cat(chunked) - expected).abs().max() < 1e-4
    reference.config.sliding_window = None
    assert (reference_logits(reference, ids) - expected)[4096:].abs().max() > 1e-4, "the window changes nothing"


def test_qwen2_ignores_its_window_unless_told_to_use_it():
    _, folder = tiny("qwen2", use_sliding_window=False, sliding_window=4)
    assert [layer.sliding_window for layer in load(folder).spec.layers] == [None] * 3
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    config |= {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert [layer.sliding_window for layer in load(folder).spec.layers] == [None] * 3
    config["use_sliding_window"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert [layer.sliding_window for layer in load(folder).spec.layers] == [None, 4, 4]


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {}, [7, 7, 7]),
        ("mistral", {"sliding_window": None}, [None] * 3),
        ("gemma2", {}, [6, None, 6]),
        ("gemma3", {}, [6, 6, 6, 6, 6, None, 6]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5}, [None, 5, None, 5, None]),
        ("llama1", {}, [None] * 3),
    ],
)
def test_windows_by_layer(family, fields, windows):
    reference, folder = tiny(family, **fields)
    model = load(folder)
    assert [layer.sliding_window for layer in model.spec.layers] == windows
    ids = torch.randint(3, 96, (20,))
    assert (dense_logits(model, ids) - reference_logits(reference, ids)).abs().max() < 1e-4

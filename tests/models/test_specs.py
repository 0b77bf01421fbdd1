"""Reading configs: what is refused, and with what words; tied heads, prefixes, dtypes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, dense_logits, load, randomize, reference_logits, save, tiny

from qengine.checkpoint import open_checkpoint
from qengine.errors import CheckpointError, UnsupportedError
from qengine.layers.attention import DenseContext
from qengine.models import ARCHITECTURES, linear_paths, load_layer, load_model, model_spec
from qengine.quant import open_weights


@pytest.fixture
def llama():
    return tiny("llama1")


def _edit(folder, remove=(), **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    for key in remove:
        config.pop(key, None)
    path.write_text(json.dumps(config))


def _edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_unknown_architecture_is_refused_with_the_known_ones(llama):
    _edit(llama[1], architectures=["BloomForCausalLM"])
    with pytest.raises(UnsupportedError) as refusal:
        model_spec(open_checkpoint(llama[1]))
    assert all(name in str(refusal.value) for name in ("BloomForCausalLM", *ARCHITECTURES))


def test_every_family_is_tested():
    tested = {f"{name}ForCausalLM" for name, _ in FAMILIES.values()}
    assert tested == set(ARCHITECTURES) - {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "num_attention_heads=5"),
        ({"num_hidden_layers": 4}, r"num_hidden_layers=4.*no tensors of layers \[3\]"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers=2.*layers \[2\] too"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_wrong_config_values_are_named(llama, changes, words):
    _edit(llama[1], **changes)
    with pytest.raises(CheckpointError, match=words):
        model_spec(open_checkpoint(llama[1]))


def test_unknown_activation_is_refused_with_the_known_ones(llama):
    _edit(llama[1], hidden_act="wiggle")
    with pytest.raises(UnsupportedError, match=r"wiggle.*silu"):
        model_spec(open_checkpoint(llama[1]))


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu", "relu2", "gelu_fast"])
def test_activations(name):
    reference, folder = tiny("llama1", hidden_act=name)
    ids = torch.randint(3, 96, (9,))
    assert (dense_logits(load(folder), ids) - reference_logits(reference, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 96}, r"layers.0.mlp.gate_proj.*\[80, 48\].*\[96, 48\]"),
        ({"vocab_size": 100}, r"embed_tokens.*\[96, 48\].*\[100, 48\]"),
    ],
)
def test_shapes_that_contradict_the_config_are_refused_with_the_layer(llama, changes, words):
    _edit(llama[1], **changes)
    with pytest.raises(CheckpointError, match=words):
        load(llama[1])


def test_missing_and_misshapen_tensors_are_refused_by_name():
    _, folder = tiny("qwen2")
    _edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj: its bias is missing"):
        load(folder)
    _, folder = tiny("qwen3")
    _edit_tensors(folder, lambda t: t.update({"model.layers.2.self_attn.q_norm.weight": torch.ones(7)}))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_norm\.weight.*\[7\].*\[24\]"):
        load(folder)
    _, folder = tiny("llama1")
    _edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(folder)


def test_bidirectional_gemma_is_refused():
    _, folder = tiny("gemma2")
    _edit(folder, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
        model_spec(open_checkpoint(folder))


def _multimodal():
    text = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6, "max_position_embeddings": 128}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, **heads}, vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    config._attn_implementation = "eager"
    config.text_config._attn_implementation = "eager"
    torch.manual_seed(0)
    return randomize(transformers.Gemma3ForConditionalGeneration(config).eval())


def test_text_part_of_a_multimodal_gemma_under_old_and_new_names():
    model = _multimodal()
    folder = save(model)
    ids = torch.randint(3, 96, (17,))
    expected = reference_logits(model, ids)
    assert (dense_logits(load(folder), ids) - expected).abs().max() < 1e-4
    for prefix in ("language_model.model.", "model.language_model."):

        def rename(tensors, prefix=prefix):
            for name in [n for n in tensors if "language_model." in n]:
                rest = name.replace("language_model.", "").removeprefix("model.").removeprefix("model.")
                tensors[prefix + rest] = tensors.pop(name)

        _edit_tensors(folder, rename)
        ours = load(folder)
        assert ours.spec.prefix == prefix
        assert (dense_logits(ours, ids) - expected).abs().max() < 1e-4


def test_multimodal_gemma_config_that_leaves_out_the_defaults():
    _, folder = tiny("gemma3", num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    path = folder / "config.json"
    full = json.loads(path.read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    text = {key: full[key] for key in kept} | {"model_type": "gemma3_text"}
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    expected = model_spec(open_checkpoint(folder))
    path.write_text(json.dumps(wrapper))
    spec = model_spec(open_checkpoint(folder))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (8, 4, 256, 1e-6)
    assert [layer.rope.theta for layer in spec.layers] == [layer.rope.theta for layer in expected.layers]
    assert spec.tied_head


def test_tied_head_shares_the_embedding_and_an_untied_one_does_not():
    reference, folder = tiny("qwen2")
    model = load(folder)
    assert model.spec.tied_head
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert model.head.dense_weight() is model.embedding.weight
    _, other = tiny("llama1")
    untied = load(other)
    assert not torch.equal(untied.head.dense_weight(), untied.embedding.weight)
    ids = torch.randint(3, 96, (9,))
    assert (dense_logits(model, ids) - reference_logits(reference, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_in_fp16_keeps_its_residual_beyond_the_range_of_fp16(family):
    reference, folder = tiny(family)

    def grow(tensors):  # adds about 90,000 to the residual stream in each layer
        for name in tensors:
            if name.endswith("post_feedforward_layernorm.weight"):
                tensors[name] = tensors[name] + 60000.0 / 2

    _edit_tensors(folder, grow)
    grown = type(reference).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 96, (15,))
    expected = reference_logits(grown, ids)
    model = load(folder, torch.float16)
    hidden = model.embed(ids)
    assert hidden.dtype == torch.float32
    ours = dense_logits(model, ids)
    assert torch.isfinite(ours).all()
    # fp16 sublayers: 11 bits in each of some ten roundings a layer
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()
    with torch.no_grad():
        peak = grown.model(ids[None], output_hidden_states=True).hidden_states[-2].abs().max()
    assert peak > 65504, "the residual fits in fp16: the test is void"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype):
    reference, folder = tiny("qwen3")
    ids = torch.randint(3, 96, (12,))
    expected = reference_logits(reference, ids)
    ours = dense_logits(load(folder, dtype), ids)
    assert ours.dtype == torch.float32
    assert (ours - expected).abs().max() < (0.15 if dtype == torch.bfloat16 else 0.02) * expected.abs().max()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_layer_alone_has_each_linear_by_its_name_and_computes_the_same(family):
    _, folder = tiny(family)
    checkpoint = open_checkpoint(folder)
    spec = model_spec(checkpoint)
    whole = load_model(checkpoint, dtype=torch.float32, device="cpu")
    ids, positions = torch.randint(3, 96, (10,)), torch.arange(5).repeat(2)
    hidden = whole.embed(ids)
    for index, layer in enumerate(whole.layers):
        alone = load_layer(open_weights(checkpoint), spec, index, dtype=torch.float32, device="cpu", fuse=False)
        linears = alone.linears()
        assert {name: linear.shape for name, linear in linears.items()} == spec.linear_shapes()
        seen = {}
        for name, linear in linears.items():
            linear.observer = lambda x, name=name, seen=seen: seen.__setitem__(name, x.shape)
        expected = layer(hidden, positions, DenseContext(2, 5))
        got = alone(hidden, positions, DenseContext(2, 5))
        assert (got - expected).abs().max() < 1e-5
        assert seen == {name: (10, shape[1]) for name, shape in spec.linear_shapes().items()}
        hidden = expected


def test_linear_paths_counts_each_kind_once(llama):
    rows = linear_paths(open_checkpoint(llama[1]), device="cpu")
    assert sum(row["count"] for row in rows) == 3 * 7 + 1
    assert {row["name"] for row in rows} == {*model_spec(open_checkpoint(llama[1])).linear_shapes(), "lm_head"}


def test_progress_is_reported(llama):
    seen = []
    load_model(open_checkpoint(llama[1]), dtype=torch.float32, device="cpu", progress=lambda *x: seen.append(x))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "name", ["model.norm", "model.embed_tokens", "lm_head", "model.layers.2.post_attention_layernorm"]
)
@pytest.mark.parametrize("shape", [None, (3, 3)])
def test_parts_outside_the_linears_are_checked_before_a_weight_is_read(llama, monkeypatch, name, shape):
    def change(tensors):
        del tensors[f"{name}.weight"]
        if shape:
            tensors[f"{name}.weight"] = torch.zeros(shape)

    _edit_tensors(llama[1], change)
    checkpoint = open_checkpoint(llama[1])
    monkeypatch.setattr(checkpoint.tensors, "load", lambda name, rows=None: pytest.fail(f"{name} was read"))
    with pytest.raises(CheckpointError, match=name):
        load_model(checkpoint, dtype=torch.float32, device="cpu")


def test_a_head_of_its_own_goes_before_a_config_that_ties_it_as_in_transformers():
    reference, folder = tiny("smollm2")
    ids = torch.randint(3, 96, (9,))
    tied = dense_logits(load(folder), ids)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    assert torch.equal(dense_logits(load(folder), ids), tied)
    _edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": table.flip(0).contiguous()}))
    expected = reference_logits(type(reference).from_pretrained(folder), ids)
    assert (expected - tied).abs().max() > 0.1
    assert (dense_logits(load(folder), ids) - expected).abs().max() < 1e-4


def test_smollm3_without_a_list_leaves_out_every_nth_rotation():
    reference, folder = tiny("smollm3")
    _edit(folder, remove=["no_rope_layers"])
    assert [layer.rope is None for layer in load(folder).spec.layers] == [False, True, False, True, False]
    ids = torch.randint(3, 96, (20,))
    assert (dense_logits(load(folder), ids) - reference_logits(reference, ids)).abs().max() < 1e-4

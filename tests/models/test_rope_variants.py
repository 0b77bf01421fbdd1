"""Every kind of rotary embedding against transformers, within the original context and beyond it."""

import json

import pytest
import torch
from rope_variants import VARIANTS
from tiny_models import PagedRun, dense_logits, load, reference_logits, tiny

from qengine.checkpoint import open_checkpoint
from qengine.errors import CheckpointError, UnsupportedError
from qengine.models import model_spec

TOLERANCE = 1e-4
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
}


def _edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))


def _difference(reference, model, length):
    ids = torch.randint(3, 96, (length,))
    return (dense_logits(model, ids) - reference_logits(reference, ids)).abs().max().item()


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name):
    parameters = {"rope_theta": 300.0, **VARIANTS[name]}
    reference, folder = tiny("llama1", max_position_embeddings=64, rope_parameters=parameters)
    model = load(folder)
    assert model.spec.layers[0].rope.kind == parameters["rope_type"]
    for length in (20, 63, 64, 65, 150):
        reference.model.rotary_emb.__init__(reference.config)  # dynamic: forget the length of the call before
        assert _difference(reference, model, length) < TOLERANCE, length


@pytest.mark.parametrize("name", VARIANTS)
def test_old_style_under_type_or_rope_type(name):
    parameters = dict(VARIANTS[name])
    reference, folder = tiny("llama1", max_position_embeddings=64, rope_parameters={"rope_theta": 300.0, **parameters})
    kind = parameters.pop("rope_type")
    for key in ("type", "rope_type"):
        _edit(folder, rope_parameters=None, rope_theta=300.0, rope_scaling={key: kind, **parameters})
        model = load(folder)
        assert model.spec.layers[0].rope.kind == kind
        reference.model.rotary_emb.__init__(reference.config)  # dynamic: forget the length of the call before
        assert _difference(reference, model, 100) < TOLERANCE
    _edit(folder, rope_scaling=None)
    assert _difference(reference, load(folder), 100) > 100 * TOLERANCE, "the variant changes nothing: the test is void"


def test_qwen2_yarn_given_as_type_is_applied():
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
    reference, folder = tiny("qwen2", rope_parameters=parameters)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    _edit(folder, rope_parameters=None, rope_theta=300.0, rope_scaling=scaling)
    assert _difference(reference, load(folder), 90) < TOLERANCE


def _longrope():
    fields = {"num_attention_heads": 6, "num_key_value_heads": 2}
    extra = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "sliding_window": None}
    return tiny("phi3", rope_parameters=dict(LONGROPE), **fields, **extra)


def test_longrope_picks_its_factors_by_the_length_of_the_prompt():
    reference, folder = _longrope()
    model = load(folder)
    assert model.spec.rope_switch_length == 32
    for length in (5, 31, 32, 33, 90):
        assert _difference(reference, model, length) < TOLERANCE, length


def test_longrope_old_style_and_old_names():
    reference, folder = _longrope()
    for name in ("longrope", "su", "yarn"):
        scaling = {"type": name, **{k: v for k, v in LONGROPE.items() if k.endswith("_factor")}}
        _edit(folder, rope_parameters=None, rope_theta=1000.0, rope_scaling=scaling)
        assert _difference(reference, load(folder), 50) < TOLERANCE


def test_longrope_judges_each_sequence_of_a_batch_by_itself_and_chunks_by_the_whole_prompt():
    reference, folder = _longrope()
    model = load(folder)
    short, long = torch.randint(3, 96, (20,)), torch.randint(3, 96, (50,))
    expected = {0: reference_logits(reference, short), 1: reference_logits(reference, long)}
    run = PagedRun(model, [20, 50])
    prompts = {0: 19, 1: 48}
    got = {0: [], 1: []}
    steps = [
        {0: short[:10], 1: long[:20]},
        {0: short[10:19], 1: long[20:48]},
        {0: short[19:], 1: long[48:49]},
        {1: long[49:]},
    ]
    for parts in steps:
        for row, logits in run.step(parts, prompts).items():
            got[row].append(logits)
    for row in (0, 1):
        assert (torch.cat(got[row]) - expected[row]).abs().max() < TOLERANCE


def test_partial_rotary_of_phi4():
    factors = {"short_factor": [1.0, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0]}
    fields = {"partial_rotary_factor": 0.75, "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": None}
    reference, folder = tiny(
        "phi3",
        rope_parameters={**LONGROPE, **factors, "partial_rotary_factor": 0.75},
        original_max_position_embeddings=32,
        tie_word_embeddings=True,
        **fields,
    )
    model = load(folder)
    assert model.spec.layers[0].rope.rotary_dim == 6
    assert model.spec.head_dim == 8
    for length in (30, 60):
        assert _difference(reference, model, length) < TOLERANCE


def test_dynamic_decodes_as_transformers_does_beyond_the_trained_length():
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 300.0}
    reference, folder = tiny("llama1", max_position_embeddings=16, rope_parameters=parameters)
    ids = torch.randint(3, 96, (1, 14))
    out = reference.generate(
        ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    run = PagedRun(load(folder), [22])
    for step, expected in enumerate(out.logits):
        first = 0 if step == 0 else 13 + step
        got = run.step({0: out.sequences[0, first : 14 + step]})[0][-1]
        assert (got - expected[0]).abs().max() < TOLERANCE


def test_gemma3_old_style_scales_the_full_layers_only():
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    }
    reference, folder = tiny("gemma3", rope_parameters=parameters)
    assert _difference(reference, load(folder), 40) < TOLERANCE
    scaling = {"rope_type": "linear", "factor": 4.0}
    _edit(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=5000.0, rope_local_base_freq=70.0)
    assert _difference(reference, load(folder), 40) < TOLERANCE


@pytest.mark.parametrize(
    ("scaling", "error", "words"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, UnsupportedError, "spiral.*default, linear, dynamic, yarn, longrope"),
        ({"rope_type": "linear"}, CheckpointError, "factor is missing"),
        ({"type": "linear", "factor": "two"}, CheckpointError, "factor is 'two'"),
        ({"rope_type": "llama3", "factor": 8.0}, CheckpointError, "low_freq_factor"),
        ({"rope_type": 4}, CheckpointError, "rope_type is 4"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, CheckpointError, "short.*6 numbers"),
        ("linear", CheckpointError, "rope_scaling is 'linear'"),
    ],
)
def test_wrong_parameters_are_refused_by_name(scaling, error, words):
    _, folder = tiny("llama1")
    _edit(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    with pytest.raises(error, match=words):
        model_spec(open_checkpoint(folder))

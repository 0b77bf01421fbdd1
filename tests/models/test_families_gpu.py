"""Every family through the fused kernels on a GPU, in float16, against transformers in float32.

Run again with TRITON_OVERRIDE_ARCH=sm75 for the code that Turing gets.
"""

import json

import pytest
import torch
from device_run import DeviceRun
from rope_variants import VARIANTS
from tiny_models import FAMILIES, reference_logits, tiny

from qengine.checkpoint import open_checkpoint
from qengine.kernels.fused.card import capability
from qengine.models import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEAN = 6e-3
LARGEST = 8e-2
CUTS = [
    {0: 13, 1: 3},
    {0: 5, 1: 1, 2: 9},
    {0: 1, 1: 1, 2: 2, 3: 1},
    {3: 2, 0: 1, 2: 1},
    *[{0: 1, 1: 1, 2: 1}] * 3,
    {0: 6, 1: 3, 2: 4, 3: 2},
]
SIZES = {"hidden_size": 128, "intermediate_size": 192}


def _load(folder):
    return load_model(open_checkpoint(folder), dtype=torch.float16, device="cuda")


def _check(got, expected, mean=MEAN, largest=LARGEST):
    difference = (got - expected).abs() / expected.std()
    assert difference.mean().item() < mean
    assert difference.max().item() < largest


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("head_dim", [32, 80])
def test_chunks_and_single_tokens_of_a_family(family, head_dim):
    fields = {"head_dim": head_dim} if family not in ("phi3", "stablelm", "stablelm-12b", "olmo2") else {}
    fields |= {"num_attention_heads": 4} if family == "smollm2" else {}
    reference, folder = tiny(family, **SIZES, **fields)
    lengths = [29, 11, 19, 5]
    texts = [torch.randint(3, 96, (n,)) for n in lengths]
    expected = [reference_logits(reference, text) for text in texts]
    run = DeviceRun(_load(folder), lengths)
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    for cut in CUTS:
        parts = {row: texts[row][run.cached[row] : run.cached[row] + count] for row, count in cut.items()}
        for row, logits in run.step(parts).items():
            got[row].append(logits)
    assert run.cached == lengths
    _check(torch.cat([torch.cat(rows) for rows in got]), torch.cat(expected))


@pytest.mark.parametrize(("kind", "mean"), [("int8", 2e-2), ("int4", 2e-1), ("fp8", 6e-2)])
def test_quantized_caches_stay_near(kind, mean):
    if kind == "fp8" and capability(torch.device("cuda")) < 89:
        pytest.skip("fp8 needs compute capability 8.9")
    reference, folder = tiny("llama1", **SIZES, head_dim=64, num_key_value_heads=2)
    text = torch.randint(3, 96, (90,))
    run = DeviceRun(_load(folder), [90], kind=kind)
    got = [run.step({0: text[a:b]})[0] for a, b in [(0, 40), (40, 41), (41, 88), (88, 89), (89, 90)]]
    _check(torch.cat(got), reference_logits(reference, text), mean, 20 * mean)


def test_4200_tokens_through_a_window_of_4096():
    fields = {"sliding_window": 4096, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    reference, folder = tiny("mistral", head_dim=64, **SIZES, **fields)
    reference.set_attn_implementation("sdpa")
    ids = torch.randint(3, 96, (4200,))
    run = DeviceRun(_load(folder), [4200])
    chunked = [run.step({0: part})[0] for part in (ids[:1000], ids[1000:4100], ids[4100:4199], ids[4199:])]
    _check(torch.cat(chunked), reference_logits(reference, ids))


def test_gemma_in_float16_keeps_its_residual_in_float32():
    reference, folder = tiny("gemma3", **SIZES, head_dim=64)
    with torch.no_grad():  # a residual stream beyond float16's 65504, as the large Gemmas have
        reference.model.layers[0].post_feedforward_layernorm.weight.add_(1e5)
    reference.save_pretrained(folder)
    ids = torch.randint(3, 96, (12,))
    run = DeviceRun(_load(folder), [12])
    got = run.step({0: ids})[0]
    assert got.isfinite().all()
    _check(got, reference_logits(reference, ids), 2e-2, 2e-1)


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling, rope_type", "rope_scaling, type"])
@pytest.mark.parametrize("name", VARIANTS)
def test_rope_variants_under_every_name(name, style):
    parameters = dict(VARIANTS[name])
    rope = {"rope_theta": 300.0, **parameters}
    reference, folder = tiny("llama1", max_position_embeddings=64, rope_parameters=rope, **SIZES, head_dim=64)
    if style != "rope_parameters":  # what configs were like before transformers 5
        kind = parameters.pop("rope_type")
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        key = style.partition(", ")[2]
        path.write_text(json.dumps({**config, "rope_theta": 300.0, "rope_scaling": {key: kind, **parameters}}))
    length = 60 if name == "dynamic" else 150  # past its context, dynamic depends on how the prompt is cut
    ids = torch.randint(3, 96, (length,))
    run = DeviceRun(_load(folder), [length])
    cuts = [(0, 41), (41, 42), (42, length - 1), (length - 1, length)]
    got = torch.cat([run.step({0: ids[a:b]}, {0: length})[0] for a, b in cuts])
    _check(got, reference_logits(reference, ids))


def test_partial_rotation_turns_the_first_dimensions_alone():
    fields = {"partial_rotary_factor": 0.25}
    reference, folder = tiny("stablelm", **SIZES, **fields)
    ids = torch.randint(3, 96, (40,))
    run = DeviceRun(_load(folder), [40])
    got = torch.cat([run.step({0: ids[:30]})[0], run.step({0: ids[30:31]})[0], run.step({0: ids[31:]})[0]])
    _check(got, reference_logits(reference, ids))
    other, _ = tiny("stablelm", **SIZES, partial_rotary_factor=1.0)
    assert (reference_logits(other, ids) - reference_logits(reference, ids)).abs().max() > LARGEST, "changes nothing"


def test_qwen2_without_use_sliding_window_sees_everything():
    reference, folder = tiny("qwen2", **SIZES, head_dim=64, use_sliding_window=False, sliding_window=4)
    ids = torch.randint(3, 96, (33,))
    run = DeviceRun(_load(folder), [33])
    got = torch.cat([run.step({0: ids[:32]})[0], run.step({0: ids[32:]})[0]])
    _check(got, reference_logits(reference, ids))

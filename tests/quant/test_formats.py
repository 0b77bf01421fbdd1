"""Kinds of checkpoint of which no library's file is at hand, synthesized by rules written independently."""

import json
import logging

import pytest
import slow_formats as slow
import torch

from qengine.checkpoint import open_checkpoint
from qengine.quant import PlainWeight, open_weights
from qengine.quant.config import parse_quant_config
from qengine.quant.overrides import module_setting

LAYER = "model.layers.0.self_attn.q_proj"
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def contiguous(in_features, group):
    return [k // group for k in range(in_features)]


def opened(folder):
    source = open_weights(open_checkpoint(folder))
    source.check()
    return source


def assert_layer(source, q, z, s, g_idx, name=LAYER):
    weight = source.linear(name)
    assert torch.equal(weight.q, q)
    assert torch.equal(weight.zeros.long(), z.long())
    assert torch.equal(weight.scales, s)
    assert torch.equal(weight.dequantize(), slow.dequantized(q, z, s, g_idx))
    return weight


def gptq_folder(path, q, z, s, bits, group, *, g_idx=None, v2=False, planar=False, **config):
    layout = "gptq_p" if planar else "gptq_v2" if v2 else "gptq"
    quant = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "checkpoint_format": layout}
    tensors = slow.gptq_tensors(q, z, s, bits, g_idx=g_idx, v2=v2, planar=planar)
    return slow.write_checkpoint(path, slow.prefixed(LAYER, tensors), {**quant, **config})


# GPTQ


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("in_features", "group"), [(64, 32), (96, -1), (100, 32), (40, 128), (72, 16)])
def test_gptq(tmp_path, bits, v2, in_features, group):
    size = group if group > 0 else in_features
    g_idx = contiguous(in_features, size)
    q, z, s = slow.random_layer(40, in_features, g_idx[-1] + 1, bits)
    # Word-wise v1, as the packer of the test writes it, is told by the writer's name; 5 to 7 bits of it are planar.
    writer = {"meta": {"quantizer": ["qengine:0.1.0"]}}
    source = opened(gptq_folder(tmp_path, q, z, s, bits, group, g_idx=g_idx, v2=v2, **writer))
    weight = assert_layer(source, q, z, s, g_idx)
    assert weight.g_idx is None
    assert weight.spec.bits == bits
    assert weight.spec.group_size == (group if group > 0 else -1)
    assert weight.spec.format == ("gptq_v2" if v2 else "gptq")
    assert source.linear_shape(LAYER) == (40, in_features)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_act_order(tmp_path, bits):
    g_idx = (torch.randperm(96) // 32).tolist()
    q, z, s = slow.random_layer(64, 96, 3, bits)
    source = opened(gptq_folder(tmp_path, q, z, s, bits, 32, g_idx=g_idx, v2=True, desc_act=True))
    weight = assert_layer(source, q, z, s, g_idx)
    assert weight.spec.desc_act
    assert weight.g_idx.tolist() == g_idx


def test_gptq_act_order_is_told_by_g_idx_not_by_the_flag(tmp_path):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    source = opened(gptq_folder(tmp_path, q, z, s, 4, 32, g_idx=contiguous(64, 32), v2=True, desc_act=True))
    assert not assert_layer(source, q, z, s, contiguous(64, 32)).spec.desc_act


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7])
def test_gptq_p(tmp_path, bits):
    q, z, s = slow.random_layer(64, 96, 3, bits)
    g_idx = contiguous(96, 32)
    source = opened(gptq_folder(tmp_path, q, z, s, bits, 32, g_idx=g_idx, v2=True, planar=True, **GPTQMODEL))
    assert assert_layer(source, q, z, s, g_idx).spec.format == ("gptq_v2" if bits == 4 else "gptq_p")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("tensors_v2", [False, True])
@pytest.mark.parametrize("config_v2", [False, True])
def test_symmetric_zero_points_decide_the_version(tmp_path, caplog, bits, tensors_v2, config_v2):
    q, z, s = slow.random_layer(64, 64, 2, bits)
    z = torch.full_like(z, 2 ** (bits - 1))
    g_idx = contiguous(64, 32)
    layout = "gptq_v2" if config_v2 else "gptq"
    folder = gptq_folder(tmp_path, q, z, s, bits, 32, g_idx=g_idx, v2=tensors_v2, checkpoint_format=layout, sym=True)
    with caplog.at_level(logging.WARNING, "qengine"):
        assert_layer(opened(folder), q, z, s, g_idx)
    assert ("the tensors decide" in caplog.text) == (tensors_v2 != config_v2)


def test_layers_of_both_versions_in_one_checkpoint(tmp_path):
    tensors, layers = {}, {}
    for number, v2 in enumerate((False, True)):
        name = f"model.layers.{number}.mlp.up_proj"
        q, z, s = slow.random_layer(64, 64, 2, 4)
        layers[name] = (q, torch.full_like(z, 8), s)
        tensors |= slow.prefixed(name, slow.gptq_tensors(*layers[name], 4, g_idx=contiguous(64, 32), v2=v2))
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant))
    for name, (q, z, s) in layers.items():
        assert_layer(source, q, z, s, contiguous(64, 32), name)


def test_sides_disagree_on_the_version_of_an_asymmetric_model(tmp_path):
    """optimum's save(): gptq_v2 in config.json over v1 tensors, gptq in quantize_config.json."""
    q, z, s = slow.random_layer(64, 64, 2, 4)
    z.clamp_(min=1)
    folder = gptq_folder(tmp_path, q, z, s, 4, 32, g_idx=contiguous(64, 32), v2=False, checkpoint_format="gptq_v2")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "checkpoint_format": "gptq"}))
    assert_layer(opened(folder), q, z, s, contiguous(64, 32))


def test_gptqmodel_v1_zero_point_0_borrows_and_autogptq_wraps(tmp_path):
    q, z, s = slow.random_layer(32, 32, 1, 4)
    z[:8, 0] = torch.tensor([0, 5, 15, 8, 1, 0, 7, 3])
    by = {"gptqmodel": GPTQMODEL, "autogptq": {}}
    read = {}
    for name, config in by.items():
        source = opened(gptq_folder(tmp_path / name, q, z, s, 4, 32, g_idx=[0] * 32, **config))
        read[name] = source.linear(LAYER).zeros[:8, 0].tolist()
    assert read["gptqmodel"] == [0, 5, 15, 8, 1, 0, 7, 3]
    assert read["autogptq"] == [0, 4, 15, 8, 1, 0, 6, 3]


def test_v1_and_v2_twins_are_the_same(tmp_path):
    q, z, s = slow.random_layer(48, 96, 3, 4)
    twins = []
    for v2 in (False, True):
        folder = gptq_folder(tmp_path / str(v2), q, z, s, 4, 32, g_idx=contiguous(96, 32), v2=v2, **GPTQMODEL)
        twins.append(opened(folder).linear(LAYER).dequantize())
    assert torch.equal(*twins)


def test_dynamic_overrides_and_a_wrong_config(tmp_path, caplog):
    q, z, s = slow.random_layer(32, 64, 4, 8)
    tensors = slow.prefixed(LAYER, slow.gptq_tensors(q, z, s, 8, g_idx=contiguous(64, 16), v2=True))
    other = "model.layers.1.mlp.up_proj"
    q2, z2, s2 = slow.random_layer(32, 64, 2, 4)
    tensors |= slow.prefixed(other, slow.gptq_tensors(q2, z2, s2, 4, g_idx=contiguous(64, 32), v2=True))
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.randn(4, 8).half()
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2", "sym": False}
    dynamic = {r"-:.*down_proj": {}, r"+:model\.layers\.0\.": {"bits": 8, "group_size": 16}, r".*q_proj": {"bits": 2}}
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(slow.write_checkpoint(tmp_path / "a", tensors, {**quant, "dynamic": dynamic}))
        assert_layer(source, q, z, s, contiguous(64, 16))
        assert_layer(source, q2, z2, s2, contiguous(64, 32), other)
    assert caplog.text == ""
    assert isinstance(source.linear("model.layers.1.mlp.down_proj"), PlainWeight)
    with caplog.at_level(logging.WARNING, "qengine"):  # the same without the field: the tensors tell
        assert_layer(opened(slow.write_checkpoint(tmp_path / "b", tensors, quant)), q, z, s, contiguous(64, 16))
    assert "bits=4" in caplog.text


def test_the_first_dynamic_rule_that_matches_wins(tmp_path, caplog):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    tensors = slow.prefixed(LAYER, slow.gptq_tensors(q, z, s, 4, g_idx=contiguous(64, 32), v2=True))
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2", "sym": False}
    dynamic = {"-:.*q_proj": {}, ".*": {"bits": 8, "group_size": 16}}
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(slow.write_checkpoint(tmp_path, tensors, {**quant, "dynamic": dynamic}))
        assert_layer(source, q, z, s, contiguous(64, 32))
    assert caplog.text == ""


@pytest.mark.parametrize("side_file", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_config_only_in_a_side_file(tmp_path, side_file):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    tensors = slow.prefixed(LAYER, slow.gptq_tensors(q, z, s, 4, g_idx=contiguous(64, 32), v2=True))
    quant = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant, side_file=side_file))
    assert source.method == "gptq"
    assert source.config.origin == side_file
    assert_layer(source, q, z, s, contiguous(64, 32))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_config_inside_text_config(tmp_path, key):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    tensors = slow.prefixed(LAYER, slow.compressed_tensors(q, z, s, 4))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    quant = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    text = {"hidden_size": 64, key: {**quant, "quant_method": "compressed-tensors"}}
    folder = slow.write_checkpoint(tmp_path, tensors, config={"text_config": text})
    assert open_checkpoint(folder).text_config()["hidden_size"] == 64
    source = opened(folder)
    assert source.method == "compressed-tensors"
    assert_layer(source, q, z, s, contiguous(64, 32))


def test_no_config_at_all(tmp_path, caplog):
    q, z, s = slow.random_layer(64, 64, 2, 4)
    tensors = slow.prefixed(LAYER, slow.awq_gemm_tensors(q, z, s, 4))
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(slow.write_checkpoint(tmp_path, tensors))
    assert source.method == "awq"
    assert "no quantization config" in caplog.text
    assert_layer(source, q, z, s, contiguous(64, 32))


# AWQ


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [-1, 16, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_awq_gemm(tmp_path, bits, group, dtype):
    size = group if group > 0 else 128
    q, z, s = slow.random_layer(96, 128, 128 // size, bits, dtype)
    tensors = slow.prefixed(LAYER, slow.awq_gemm_tensors(q, z, s, bits))
    tensors[f"{LAYER}.bias"] = torch.randn(96).to(dtype)
    quant = {"quant_method": "awq", "bits": bits, "group_size": group, "version": "GEMM", "zero_point": True}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant))
    weight = assert_layer(source, q, z, s, contiguous(128, size))
    assert weight.spec.group_size == group
    assert torch.equal(weight.bias, tensors[f"{LAYER}.bias"])


def test_old_awq_side_file(tmp_path):
    q, z, s = slow.random_layer(64, 128, 2, 4)
    tensors = slow.prefixed(LAYER, slow.awq_gemm_tensors(q, z, s, 4))
    quant = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant, side_file="quant_config.json"))
    assert source.method == "awq"
    assert assert_layer(source, q, z, s, contiguous(128, 64)).spec.sym is False


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv(tmp_path, group):
    groups = 256 // group
    q, z, s = slow.random_layer(24, 256, groups, 4)
    zero_words = {32: 4, 64: 2, 128: 1}[group]
    padding = 8 * zero_words - groups
    tensors = {
        "qweight": slow.matrix([slow.stream(row, 4) for row in q.tolist()]),
        "qzeros": slow.matrix([slow.stream([*row, *[0] * padding], 4) for row in z.tolist()]),
        "scales": torch.cat([s, torch.zeros(24, padding).half()], 1),
    }
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv", "zero_point": True}
    folder = slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), quant)
    assert assert_layer(opened(folder), q, z, s, contiguous(256, group)).spec.format == "gemv"


@pytest.mark.parametrize("config", [{"version": "gemv_fast"}, {"version": "gemm", "backend": "llm-awq"}])
def test_awq_gemv_fast(tmp_path, config):
    group, groups = 64, 3
    q, z, s = slow.random_layer(12, 192, groups, 4)
    s.abs_().clamp_(min=1e-3)
    words = torch.zeros(3, 192, dtype=torch.int64)
    for n in range(12):
        for k in range(192):
            tile, row_in_tile = divmod(k // 32 * 32 + slow_gemv_fast_place(k % 32), 64)
            index = (n % 4) * 64 + row_in_tile
            words[n // 4, tile * 64 + index // 4] |= int(q[n, k]) << (4 * (index % 4))
    qweight = torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)
    rows = torch.zeros(16, 12, dtype=torch.float16)
    scales, qzeros = rows.clone(), rows.clone()
    scales[:groups] = s.t()
    qzeros[:groups] = (-(s.float() * z.float())).half().t()
    tensors = slow.prefixed(LAYER, {"qweight": qweight, "scales": scales, "qzeros": qzeros})
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, **config}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant))
    assert assert_layer(source, q, z, s, contiguous(192, group)).spec.format == "gemv_fast"


def slow_gemv_fast_place(k):
    """Where input k of 32 is stored: read as [4, 4, 2] with the first two axes swapped, then [4, 4, 2] the last two."""
    a, b, c = k // 8, (k % 8) // 2, k % 2
    block, rest = divmod(b * 8 + a * 2 + c, 8)
    return block * 8 + rest % 2 * 4 + rest // 2


# AutoRound


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"])
def test_auto_round_native(tmp_path, packing):
    q, z, s = slow.random_layer(64, 64, 2, 4)
    z.clamp_(min=1)
    plain = "model.layers.0.mlp.gate_proj"
    eight = "model.layers.0.mlp.up_proj"
    q8, z8, s8 = slow.random_layer(64, 64, 1, 8)
    z8.clamp_(min=1)

    def tensors_of(q, z, s, bits):
        if "awq" in packing:
            return slow.awq_gemm_tensors(q, z, s, bits)
        return slow.gptq_tensors(q, z, s, bits, g_idx=None, v2=packing == "auto_round")

    tensors = slow.prefixed(LAYER, tensors_of(q, z, s, 4)) | {f"{plain}.weight": torch.randn(64, 64).bfloat16()}
    tensors |= slow.prefixed(eight, tensors_of(q8, z8, s8, 8))
    quant = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": packing}
    quant["extra_config"] = {plain: {"bits": 16}, eight: {"bits": 8, "group_size": -1}}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant))
    assert source.method == "auto-round"
    assert_layer(source, q, z, s, contiguous(64, 32))
    assert assert_layer(source, q8, z8, s8, [0] * 64, eight).spec.group_size == -1
    assert source.linear_spec(plain) is None


# compressed-tensors


def ct_config(bits, *, version="0.19.0", layout="pack-quantized", **weights):
    scheme = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "version": version,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_pack_quantized(tmp_path, bits, padded, symmetric):
    q, z, s = slow.random_layer(40, 96, 3, bits, torch.bfloat16)
    z = torch.full_like(z, 2 ** (bits - 1)) if symmetric else z
    tensors = slow.compressed_tensors(q, None if symmetric else z, s, bits, padded=padded)
    config = ct_config(bits, version="0.15.0" if padded else "0.19.0", symmetric=symmetric)
    source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), config))
    weight = assert_layer(source, q, z, s, contiguous(96, 32))
    assert weight.spec.sym is symmetric


@pytest.mark.parametrize("padded", [False, True])
def test_layouts_of_equal_size_are_told_by_the_version(tmp_path, padded):
    """30 codes of 3 bits take 3 words either way."""
    q, z, s = slow.random_layer(30, 30, 1, 3)
    tensors = slow.compressed_tensors(q, z, s, 3, padded=padded)
    config = ct_config(3, version="0.17.1" if padded else "0.18.0", group_size=30)
    assert_layer(opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), config)), q, z, s, [0] * 30)


@pytest.mark.parametrize("symmetric", [False, True])
def test_channel_strategy(tmp_path, symmetric):
    q, z, s = slow.random_layer(24, 50, 1, 4)
    z = torch.full_like(z, 8) if symmetric else z
    tensors = slow.compressed_tensors(q, None if symmetric else z, s, 4)
    config = ct_config(4, strategy="channel", group_size=None)
    source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), config))
    assert assert_layer(source, q, z, s, [0] * 50).spec.group_size == -1


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_tensor_strategy(tmp_path, scale_shape):
    q, _, s = slow.random_layer(24, 32, 1, 8)
    s = s[:1].expand(24, 1).contiguous()
    tensors = slow.compressed_tensors(q, None, s[:1], 8) | {"weight_scale": s[0].reshape(scale_shape).clone()}
    tensors["weight_zero_point"] = torch.tensor([3], dtype=torch.int8)
    config = ct_config(8, strategy="tensor", group_size=None)
    source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), config))
    assert_layer(source, q, torch.full((24, 1), 131), s, [0] * 32)


@pytest.mark.parametrize("unset", [False, True])
def test_actorder_group(tmp_path, unset):
    order = contiguous(96, 32) if unset else (torch.randperm(96) // 32).tolist()
    q, z, s = slow.random_layer(40, 96, 3, 4)
    tensors = slow.compressed_tensors(q, z, s, 4, g_idx=[-1] * 96 if unset else order)
    config = ct_config(4, actorder="group", version="0.15.0")
    source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), config))
    assert assert_layer(source, q, z, s, order).spec.desc_act is not unset


@pytest.mark.parametrize("layout", ["naive-quantized", "int-quantized"])
@pytest.mark.parametrize("bits", [3, 8])
def test_int8_files(tmp_path, layout, bits):
    middle = 2 ** (bits - 1)
    q, z, s = slow.random_layer(24, 64, 2, bits)
    tensors = {
        "weight": (q.short() - middle).to(torch.int8),
        "weight_scale": s,
        "weight_zero_point": (z - middle).to(torch.int8),
    }
    source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), ct_config(bits, layout=layout)))
    assert assert_layer(source, q, z, s, contiguous(64, 32)).spec.format == layout


def test_groups_by_target(tmp_path, caplog):
    names = {"model.layers.0.mlp.up_proj": 8, "model.layers.0.mlp.down_proj": 3, LAYER: 4, "lm_head": 6}
    layers = {name: slow.random_layer(32, 64, 2, bits) for name, bits in names.items()}
    tensors = {}
    for name, (q, z, s) in layers.items():
        tensors |= slow.prefixed(name, slow.compressed_tensors(q, z, s, names[name]))
    config = ct_config(4)
    weights = config["config_groups"]["group_0"]["weights"]
    targets = {6: "lm_head", 8: "re:.*up_proj$", 3: "model.layers.0.mlp.down_proj"}
    extra = {f"g{bits}": {"targets": [t], "weights": {**weights, "num_bits": bits}} for bits, t in targets.items()}
    config["config_groups"] = {**extra, "group_0": config["config_groups"]["group_0"]}
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(slow.write_checkpoint(tmp_path, tensors, config))
        for name, (q, z, s) in layers.items():
            assert_layer(source, q, z, s, contiguous(64, 32), name)
    assert caplog.text == "", "a layer was taken for one of another group"


# Heads, embeddings, modules left alone


def test_tied_model_with_a_quantized_head_and_no_embedding(tmp_path, caplog):
    q, z, s = slow.random_layer(96, 64, 2, 4)
    tensors = slow.prefixed("lm_head", slow.gptq_tensors(q, z, s, 4, g_idx=contiguous(64, 32), v2=True))
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64).half()
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2", "lm_head": True}
    folder = slow.write_checkpoint(tmp_path, tensors, quant, config={"tie_word_embeddings": True})
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(folder)
    assert "tied to lm_head" in caplog.text
    assert source.has("model.embed_tokens.weight")
    expected = slow.dequantized(q, z, s, contiguous(64, 32))
    assert torch.equal(source.tensor("model.embed_tokens.weight").float(), expected)


def test_tied_model_with_a_quantized_head_and_an_embedding(tmp_path):
    q, z, s = slow.random_layer(96, 64, 2, 4)
    embedding = torch.randn(96, 64).half()
    tensors = slow.prefixed("lm_head", slow.gptq_tensors(q, z, s, 4, g_idx=contiguous(64, 32), v2=True))
    tensors["model.embed_tokens.weight"] = embedding
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2", "lm_head": True}
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant, config={"tie_word_embeddings": True}))
    assert torch.equal(source.tensor("model.embed_tokens.weight"), embedding)
    assert_layer(source, q, z, s, contiguous(64, 32), "lm_head")


def test_modules_left_alone_are_plain(tmp_path):
    q, z, s = slow.random_layer(32, 64, 2, 4)
    tensors, weights = {}, {}
    for part in ("q_proj", "k_proj", "v_proj"):
        weights[part] = torch.randn(32, 64).half()
        tensors[f"model.layers.0.self_attn.{part}.weight"] = weights[part]
        tensors |= slow.prefixed(f"model.layers.1.self_attn.{part}", slow.awq_gemm_tensors(q, z, s, 4))
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    quant["modules_to_not_convert"] = ["model.layers.0"]
    source = opened(slow.write_checkpoint(tmp_path, tensors, quant))
    for part, weight in weights.items():
        name = f"model.layers.0.self_attn.{part}"
        assert source.linear_spec(name) is None
        assert torch.equal(source.linear(name).weight, weight)
        assert_layer(source, q, z, s, contiguous(64, 32), f"model.layers.1.self_attn.{part}")
    assert not source.has("model.layers.1.self_attn.q_proj.qweight")
    assert source.has_linear("model.layers.1.self_attn.q_proj")
    assert not source.has_linear("model.layers.2.self_attn.q_proj")
    assert set(source.names()) == {f"model.layers.0.self_attn.{p}.weight" for p in weights} | {
        f"model.layers.1.self_attn.{p}" for p in weights
    }


@pytest.mark.parametrize(("declared", "real"), [("awq", "gptq"), ("gptq", "awq")])
def test_config_names_the_wrong_method(tmp_path, caplog, declared, real):
    q, z, s = slow.random_layer(64, 64, 2, 4)
    z = torch.full_like(z, 8)
    if real == "gptq":
        tensors = slow.gptq_tensors(q, z, s, 4, g_idx=contiguous(64, 32), v2=False)
    else:
        tensors = slow.awq_gemm_tensors(q, z, s, 4)
    quant = {"quant_method": declared, "bits": 4, "group_size": 32}
    with caplog.at_level(logging.WARNING, "qengine"):
        source = opened(slow.write_checkpoint(tmp_path, slow.prefixed(LAYER, tensors), quant))
        assert_layer(source, q, z, s, contiguous(64, 32))
    assert f"the tensors have {real}'s shapes" in caplog.text


def test_dynamic_patterns_are_anchored_at_the_start_and_the_first_match_wins():
    rules = {"mlp": {"bits": 8}, "-:model.layers.0.mlp": {}, "+:model.layers.*": {"bits": 3}, "model": {"bits": 2}}
    config = parse_quant_config({"quant_method": "gptq", "bits": 4, "dynamic": rules}, "config.json")
    names = ("model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj", "model.norm", "lm_head")
    assert [module_setting(config, name, "bits", 4) for name in names] == [3, 4, 2, 4]

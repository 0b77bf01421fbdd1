"""What cannot be served is refused by name with its layer, and damage is told apart from it, before weights are
loaded."""

import pytest
import slow_formats as slow
import torch

from qengine.checkpoint import TensorStore, open_checkpoint
from qengine.errors import CheckpointError, UnsupportedError
from qengine.quant import open_weights

LAYER = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
CT_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CT_WEIGHTS}},
}


def layer():
    return slow.random_layer(64, 64, 2, 4)


def gptq():
    return slow.gptq_tensors(*layer(), 4, g_idx=[k // 32 for k in range(64)], v2=True)


def awq():
    return slow.awq_gemm_tensors(*layer(), 4)


def ct():
    return slow.compressed_tensors(*layer(), 4)


def write(path, tensors, quant, **others):
    return slow.write_checkpoint(path, slow.prefixed(LAYER, tensors) | others, quant)


def assert_refused(folder, error, *words):
    source = open_weights(open_checkpoint(folder))
    with pytest.raises(error) as caught:
        source.check()
    for word in words:
        assert word in str(caught.value)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        ({**GPTQ, "quant_method": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "marlin"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "checkpoint_format": "bitblas"}, "bitblas"),
        ({**GPTQ, "checkpoint_format": "something"}, "something"),
        ({**AWQ, "version": "marlin"}, "marlin"),
        ({**CT, "format": "marlin-24"}, "marlin-24"),
        ({**CT, "format": "float-quantized"}, "float-quantized"),
        ({**CT, "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({**CT, "config_groups": {"g": {"targets": ["Linear"], "format": "float-quantized"}}}, "float-quantized"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "exl3"}, "exl3"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"quant_method": "wonderquant"}, "wonderquant"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "packing_format": "auto_round"}, "mx_fp"),
    ],
)
def test_formats_refused_by_name(tmp_path, quant, name):
    folder = write(tmp_path, gptq(), quant)
    assert_refused(folder, UnsupportedError, LAYER, name, "use the AWQ, GPTQ or compressed-tensors INT4")
    source = open_weights(open_checkpoint(folder))
    for method in (source.linear, source.linear_spec, source.linear_shape):
        with pytest.raises(UnsupportedError, match="cannot be served"):
            method(LAYER)


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        ({**GPTQ, "pack_dtype": "int16"}, ("pack_dtype=int16", "int32")),
        ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparse-24-bitmask",)),
        ({**CT, "transform_config": {"config_groups": {"u": {}}}}, ("transform_config",)),
        (
            {**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": {**CT_WEIGHTS, "type": "float"}}}},
            (LAYER, "float"),
        ),
    ],
)
def test_options_refused(tmp_path, quant, words):
    assert_refused(
        write(tmp_path, gptq() if quant["quant_method"] == "gptq" else ct(), quant), UnsupportedError, *words
    )


def test_activation_scales_of_gelu_models(tmp_path):
    folder = write(tmp_path, awq(), AWQ, **{"transformer.h.0.mlp.act.scales": torch.ones(64).half()})
    assert_refused(folder, UnsupportedError, "transformer.h.0.mlp.act", "activation", "GPTQ")


def test_float8_without_a_config(tmp_path):
    folder = slow.write_checkpoint(tmp_path, {f"{LAYER}.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    assert_refused(folder, UnsupportedError, LAYER, "float8_e4m3fn")


def test_int8_weight_without_scales(tmp_path):
    folder = slow.write_checkpoint(tmp_path, {f"{LAYER}.weight": torch.zeros(4, 4, dtype=torch.int8)}, CT)
    assert_refused(folder, UnsupportedError, LAYER, "int8")


def test_nvfp4_tensors_under_an_int_config(tmp_path):
    tensors = ct() | {"weight_packed": torch.zeros(64, 32, dtype=torch.uint8)}
    assert_refused(write(tmp_path, tensors, CT), UnsupportedError, LAYER, "nvfp4")


def test_block_scales(tmp_path):
    quant = {**CT, "config_groups": {"g": {"targets": ["Linear"], "weights": {**CT_WEIGHTS, "strategy": "block"}}}}
    tensors = ct() | {"weight_scale": torch.ones(2, 2).half()}
    tensors.pop("weight_zero_point")
    assert_refused(write(tmp_path, tensors, quant), UnsupportedError, LAYER, "block")


# Damage


BROKEN = {
    "gptq no qzeros": (gptq, GPTQ, {"qzeros": None}, "qzeros is missing"),
    "gptq no scales": (gptq, GPTQ, {"scales": None}, "scales is missing"),
    "gptq no qweight": (gptq, GPTQ, {"qweight": None}, "qweight is missing"),
    "gptq scales of ints": (gptq, GPTQ, {"scales": torch.ones(2, 64, dtype=torch.int32)}, "scales in model"),
    "gptq qweight of int64": (gptq, GPTQ, {"qweight": torch.ones(8, 64, dtype=torch.int64)}, "expected int32"),
    "gptq scales too wide": (gptq, GPTQ, {"scales": torch.ones(2, 65).half()}, "scales"),
    "gptq scales flat": (gptq, GPTQ, {"scales": torch.ones(128).half()}, "matrix"),
    "gptq scales empty": (gptq, GPTQ, {"scales": torch.ones(0, 64).half()}, "matrix"),
    "gptq qzeros too short": (gptq, GPTQ, {"qzeros": torch.ones(1, 8, dtype=torch.int32)}, "qzeros"),
    "gptq qzeros too narrow": (gptq, GPTQ, {"qzeros": torch.ones(2, 7, dtype=torch.int32)}, "no width"),
    "gptq qweight too short": (gptq, GPTQ, {"qweight": torch.ones(7, 64, dtype=torch.int32)}, "no width"),
    "gptq groups": (
        gptq,
        GPTQ,
        {"scales": torch.ones(3, 64).half(), "qzeros": torch.ones(3, 8).int(), "g_idx": None},
        "3 groups",
    ),
    "gptq g_idx too large": (gptq, GPTQ, {"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "group 2"),
    "gptq g_idx negative": (gptq, GPTQ, {"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "group -1"),
    "gptq g_idx a matrix": (gptq, GPTQ, {"g_idx": torch.zeros(8, 8, dtype=torch.int32)}, "g_idx"),
    "gptq g_idx of floats": (gptq, GPTQ, {"g_idx": torch.zeros(64)}, "g_idx"),
    "gptq bias": (gptq, GPTQ, {"bias": torch.zeros(63).half()}, "bias"),
    "awq no qzeros": (awq, AWQ, {"qzeros": None}, "qzeros is missing"),
    "awq no scales": (awq, AWQ, {"scales": None}, "scales is missing"),
    "awq no qweight": (awq, AWQ, {"qweight": None}, "qweight is missing"),
    "awq only qzeros": (awq, AWQ, {"qweight": None, "scales": None}, "qweight is missing"),
    "awq only scales": (awq, AWQ, {"qweight": None, "qzeros": None}, "qweight is missing"),
    "awq qzeros too short": (awq, AWQ, {"qzeros": torch.ones(1, 8, dtype=torch.int32)}, "qzeros"),
    "awq width": (awq, AWQ, {"qweight": torch.ones(64, 9).int(), "qzeros": torch.ones(2, 9).int()}, "no width"),
    "awq groups": (awq, AWQ, {"scales": torch.ones(3, 64).half(), "qzeros": torch.ones(3, 8).int()}, "3 groups"),
    "awq qzeros of halves": (awq, AWQ, {"qzeros": torch.ones(2, 8).half()}, "qzeros"),
    "ct no scale": (ct, CT, {"weight_scale": None}, "weight_scale is missing"),
    "ct no shape": (ct, CT, {"weight_shape": None}, "weight_shape is missing"),
    "ct no weight": (ct, CT, {"weight_packed": None}, "weight is missing"),
    "ct wrong shape": (ct, CT, {"weight_shape": torch.tensor([63, 64])}, "weight_shape"),
    "ct negative shape": (ct, CT, {"weight_shape": torch.tensor([64, -64])}, "weight_shape"),
    "ct huge shape": (ct, CT, {"weight_shape": torch.tensor([64, 10**15])}, "no width"),
    "ct scale shape": (ct, CT, {"weight_scale": torch.ones(63, 2).half()}, "weight_scale"),
    "ct scale groups": (ct, CT, {"weight_scale": torch.ones(64, 3).half()}, "3 groups"),
    "ct zero shape": (ct, CT, {"weight_zero_point": torch.ones(7, 2, dtype=torch.int32)}, "weight_zero_point"),
    "ct g_idx": (ct, CT, {"weight_g_idx": torch.full((64,), 2, dtype=torch.int32)}, "group 2"),
    "ct g_idx short": (ct, CT, {"weight_g_idx": torch.zeros(63, dtype=torch.int32)}, "weight_g_idx"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_damaged_modules(tmp_path, case, monkeypatch):
    make, quant, changes, words = BROKEN[case]
    tensors = {name: tensor for name, tensor in (make() | changes).items() if tensor is not None}
    folder = write(tmp_path, tensors, quant)
    read = []
    load = TensorStore.load
    monkeypatch.setattr(
        TensorStore, "load", lambda store, name, rows=None: (read.append(name), load(store, name, rows))[1]
    )
    assert_refused(folder, CheckpointError, LAYER, words)
    assert all(name.endswith(("g_idx", "weight_shape")) for name in read), "check() loaded weights"


@pytest.mark.parametrize(
    ("make", "quant", "name"), [(gptq, GPTQ, "scales"), (awq, AWQ, "scales"), (ct, CT, "weight_scale")]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scales_that_are_not_finite(tmp_path, make, quant, name, value):
    tensors = make()
    tensors[name][1, 1] = value
    source = open_weights(open_checkpoint(write(tmp_path, tensors, quant)))
    with pytest.raises(CheckpointError, match=f"{LAYER}: 1 of 128 values of {name} are inf or NaN"):
        source.linear(LAYER)


def test_int8_values_beyond_their_bits(tmp_path):
    tensors = {"weight": torch.full((8, 32), 5, dtype=torch.int8), "weight_scale": torch.ones(8, 1).half()}
    weights = {**CT_WEIGHTS, "num_bits": 3}
    quant = {**CT, "format": "naive-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    source = open_weights(open_checkpoint(write(tmp_path, tensors, quant)))
    source.check()
    with pytest.raises(CheckpointError, match=r"from 5 to 5, beyond 3 bits"):
        source.linear(LAYER)


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        ({**GPTQ, "bits": "four"}, "bits is 'four'"),
        ({**GPTQ, "bits": float("nan")}, "bits is nan"),
        ({**GPTQ, "bits": float("inf")}, "bits is inf"),
        ({**GPTQ, "group_size": -7}, "group_size is -7"),
        ({**GPTQ, "group_size": "128"}, "group_size is '128'"),
        ({**GPTQ, "quant_method": 4}, "quant_method is 4"),
        ([1, 2], "quantization_config is a list"),
    ],
)
def test_configs_that_make_no_sense(tmp_path, quant, words):
    with pytest.raises(CheckpointError) as caught:
        open_weights(open_checkpoint(write(tmp_path, gptq(), quant)))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("change", [{"dynamic": {"+:([": {"bits": 8}}}, {"extra_config": {"([": {"bits": 8}}}])
def test_a_pattern_that_is_no_regular_expression(tmp_path, change):
    assert_refused(write(tmp_path, gptq(), {**GPTQ, **change}), CheckpointError, "([", "regular expression")


def test_absent_names():
    folder_error = pytest.raises(CheckpointError, match="no weight for this module")
    from vectors import vector_path

    source = open_weights(open_checkpoint(vector_path("autoawq-gemm-g64")))
    for method in (source.linear, source.linear_spec, source.linear_shape):
        with folder_error:
            method("model.layers.9.mlp.up_proj")
    with pytest.raises(CheckpointError, match="no such tensor"):
        source.tensor("model.layers.9.input_layernorm.weight")

"""Checkpoints of AutoAWQ, GPTQModel, AutoRound, llm-compressor and optimum give those libraries' own weights, bit for
bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from vectors import DATA, ORIGINALS, float32_digest, original_names, vector_expected, vector_names, vector_path

from qengine.checkpoint import open_checkpoint
from qengine.kernels.awq.packing import pack_gemm, pack_gemv, unpack_gemm, unpack_gemv, unpack_gemv_fast
from qengine.kernels.bitstream import pack_stream, unpack_stream
from qengine.kernels.gptq.packing import pack_gptq, unpack_gptq, unpack_zeros
from qengine.quant import PlainWeight, QuantizedWeight, open_weights
from qengine.quant.compressed_tensors import pack_quantized


def float32(weight):
    return weight.weight.float() if isinstance(weight, PlainWeight) else weight.dequantize(torch.float32)


def test_every_kind_is_there():
    assert len(vector_names()) == 30


@pytest.mark.parametrize("name", vector_names())
def test_weights_are_the_librarys(name):
    source = open_weights(open_checkpoint(vector_path(name)))
    source.check()
    expected = vector_expected(name)
    assert expected
    for weight, entry in expected.items():
        module = weight.removesuffix(".weight")
        ours = float32(source.linear(module))
        assert list(ours.shape) == entry["shape"] == list(source.linear_shape(module))
        assert float32_digest(ours) == entry["sha256"], weight


@pytest.mark.parametrize("name", original_names())
def test_originals(name):
    source = open_weights(open_checkpoint(ORIGINALS / name))
    source.check()
    for weight, reference in load_file(ORIGINALS / name / "dequant_fp32.safetensors").items():
        ours = float32(source.linear(weight.removesuffix(".weight")))
        if "gemvfast" in name:
            torch.testing.assert_close(ours, reference, rtol=5e-4, atol=1e-7)
        else:
            assert torch.equal(ours, reference), weight


@pytest.mark.parametrize("name", vector_names())
def test_codes_are_in_range(name):
    source = open_weights(open_checkpoint(vector_path(name)))
    for module in source.quantized_modules():
        weight, spec = source.linear(module), source.linear_spec(module)
        assert isinstance(weight, QuantizedWeight)
        assert weight.spec == spec
        assert weight.q.dtype == torch.uint8
        assert weight.zeros.dtype == torch.int16
        assert weight.q.is_contiguous()
        assert int(weight.q.max()) < 2**spec.bits
        assert int(weight.zeros.min()) >= 0
        assert int(weight.zeros.max()) < 2**spec.bits
        assert (weight.g_idx is not None) == spec.desc_act


# What a library packs the same integers to.


def examples(library):
    data = json.loads((DATA / f"packing_{library}.json").read_text())
    return {name: value for name, value in data.items() if isinstance(value, dict)}


def words(rows):
    return (
        torch.tensor([[int(word, 16) for word in row] for row in rows], dtype=torch.int64)
        .to(torch.uint32)
        .view(torch.int32)
    )


@pytest.mark.parametrize("name", sorted(examples("gptqmodel")))
def test_gptqmodel_packing(name):
    e = examples("gptqmodel")[name]
    bits, q = e["bits"], torch.tensor(e["q_in_by_out"], dtype=torch.uint8).t().contiguous()
    zeros = torch.tensor(e["zeros_group_by_out"]).t().contiguous()
    scales = torch.ones(zeros.shape, dtype=torch.float16)
    if "awq" in name:
        packed = pack_gemm(q, zeros, scales, bits)
        assert torch.equal(packed["qweight"], words(e["qweight_hex"]))
        assert torch.equal(packed["qzeros"], words(e["qzeros_hex"]))
        back = unpack_gemm(packed["qweight"], packed["qzeros"], packed["scales"], bits)
        assert torch.equal(back[0], q)
        assert torch.equal(back[1], zeros.short())
        return
    planar = "planar" in name
    packed = pack_gptq(q, zeros, scales, bits, v2=True, planar=planar)
    assert torch.equal(packed["qweight"], words(e["qweight_hex"]))
    assert torch.equal(packed["qzeros"], words(e["qzeros_v2_hex"]))
    variants = [(True, "qzeros_v2_hex")] if planar else [(True, "qzeros_v2_hex"), (False, "qzeros_v1_hex")]
    for v2, key in variants:
        assert torch.equal(pack_gptq(q, zeros, scales, bits, v2=v2, planar=planar)["qzeros"], words(e[key]))
        back = unpack_gptq(words(e["qweight_hex"]), words(e[key]), scales.t(), bits, v2=v2, planar=planar)
        assert torch.equal(back[0], q)
        assert torch.equal(back[1], zeros.short())


@pytest.mark.parametrize("name", sorted(examples("autogptq")))
def test_autogptq_packing(name):
    e = examples("autogptq")[name]
    bits, out_features = e["bits"], e["out_features"]
    q = torch.tensor(e["q_in_by_out"], dtype=torch.uint8).t().contiguous()
    zeros = torch.tensor(e["zeros_group_by_out"]).t().contiguous()
    assert torch.equal(unpack_stream(words(e["qweight_hex"]).t().contiguous(), bits, e["in_features"]), q)
    read = unpack_zeros(words(e["qzeros_hex"]), bits, out_features, v2=False, wordwise=False)
    if "zero_point_0" in name:
        # The writer destroyed the first word: its own reader then sees zero points of 0 there.
        assert torch.equal(read[:8], torch.zeros(8, 1, dtype=torch.int16))
        assert torch.equal(read[8:], zeros[8:].short())
    else:
        assert torch.equal(read, zeros.short())


def test_autoawq_gemm_packing():
    e = examples("autoawq")["gemm_2x32_g2"]
    q = torch.tensor(e["q_out_by_in"], dtype=torch.uint8)
    zeros = torch.tensor(e["zeros_out_by_group"])
    packed = pack_gemm(q, zeros, torch.ones(zeros.shape).half(), 4)
    assert torch.equal(packed["qweight"], words(e["qweight_hex"]))
    assert torch.equal(packed["qzeros"], words(e["qzeros_hex"]))
    assert list(packed["scales"].shape) == e["scales_shape"]
    q2, zeros2, _ = unpack_gemm(words(e["qweight_hex"]), words(e["qzeros_hex"]), packed["scales"], 4)
    assert torch.equal(q2, q)
    assert torch.equal(zeros2, zeros.short())


def test_autoawq_gemv_packing():
    e = examples("autoawq")["gemv_in256_out8_g64"]
    q = torch.tensor(e["q_out_by_in"], dtype=torch.uint8)
    zeros = torch.tensor(e["zeros_out_by_group"])
    packed = pack_gemv(q, zeros, torch.ones(zeros.shape).half(), e["group_size"])
    assert torch.equal(packed["qweight"], words(e["qweight_hex"]))
    assert torch.equal(packed["qzeros"], words(e["qzeros_hex"]))
    assert list(packed["scales"].shape) == e["scales_shape"]
    q2, zeros2, _ = unpack_gemv(packed["qweight"], packed["qzeros"], packed["scales"], zeros.shape[1])
    assert torch.equal(q2, q)
    assert torch.equal(zeros2, zeros.short())


def test_autoawq_gemv_fast_packing():
    e = examples("autoawq")["gemvfast_in128_out8_g64"]
    q = torch.tensor(e["q_out_by_in"], dtype=torch.uint8)
    zeros = torch.tensor(e["zeros_out_by_group"])
    data = torch.tensor([[int(w, 16) for w in row] for row in e["qweight_hex16"]]).to(torch.uint16).view(torch.int16)
    folded = torch.tensor(e["qzeros_fp16"], dtype=torch.float16)
    groups = zeros.shape[1]
    scales = torch.zeros(folded.shape, dtype=torch.float16)
    scales[:groups] = torch.where(
        zeros.t() == 0, torch.ones(()), -folded[:groups].float() / zeros.t().clamp(min=1)
    ).half()
    q2, zeros2, _ = unpack_gemv_fast(data, folded, scales, groups)
    assert torch.equal(q2, q)
    assert torch.equal(zeros2, zeros.short())


@pytest.mark.parametrize("name", sorted(examples("compressed_tensors")))
def test_compressed_tensors_packing(name):
    e = examples("compressed_tensors")[name]
    bits = int(name[1])
    middle = 2 ** (bits - 1)
    q = (torch.tensor(e["q_signed_out_by_in"]) + middle).to(torch.uint8)
    zeros = torch.tensor(e["zero_signed_out16_by_group2"]) + middle
    assert torch.equal(unpack_stream(words(e["weight_packed_hex"]), bits, q.shape[1]), q)
    assert torch.equal(pack_stream(q, bits), words(e["weight_packed_hex"]))
    rows = torch.zeros(zeros.shape[0], q.shape[1], dtype=torch.uint8)
    packed = pack_quantized(rows, zeros, torch.ones(zeros.shape).half(), bits, symmetric=False)
    assert torch.equal(packed["weight_zero_point"], words(e["weight_zero_point_hex"]))

"""Pack and unpack undo each other, and agree with the rules written code by code."""

import time

import pytest
import slow_formats as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.kernels.awq.packing import pack_gemm, pack_gemv, unpack_gemm, unpack_gemv, unpack_gemv_fast
from qengine.kernels.bitstream import (
    pack_padded,
    pack_planes,
    pack_stream,
    unpack_padded,
    unpack_planes,
    unpack_stream,
    words_for,
)
from qengine.kernels.gptq.packing import pack_gptq, unpack_gptq
from qengine.quant.compressed_tensors import pack_quantized

BITS = st.integers(2, 8)
QUICK = settings(max_examples=60, deadline=None)


def codes(rows, count, bits):
    return torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8)


@QUICK
@given(bits=BITS, rows=st.integers(1, 5), count=st.integers(1, 130))
def test_stream(bits, rows, count):
    q = codes(rows, count, bits)
    words = pack_stream(q, bits)
    assert words.shape == (rows, words_for(count, bits))
    assert torch.equal(words, slow.matrix([slow.stream(row, bits) for row in q.tolist()]))
    assert torch.equal(unpack_stream(words, bits, count), q)


@QUICK
@given(bits=BITS, rows=st.integers(1, 5), count=st.integers(1, 130))
def test_padded(bits, rows, count):
    q = codes(rows, count, bits)
    words = pack_padded(q, bits)
    assert torch.equal(words, slow.matrix([slow.padded_words(row, bits) for row in q.tolist()]))
    assert torch.equal(unpack_padded(words, bits, count), q)


@QUICK
@given(bits=BITS, rows=st.integers(1, 4), blocks=st.integers(1, 4))
def test_planes(bits, rows, blocks):
    q = codes(rows, 32 * blocks, bits)
    words = pack_planes(q, bits)
    assert torch.equal(words, slow.matrix([slow.plane_words(row, bits) for row in q.tolist()]))
    assert torch.equal(unpack_planes(words, bits, 32 * blocks), q)


@QUICK
@given(data=st.data(), bits=BITS, v2=st.booleans(), out_features=st.integers(1, 40), in_features=st.integers(1, 90))
def test_gptq(data, bits, v2, out_features, in_features):
    groups = data.draw(st.integers(1, in_features))
    g_idx = torch.tensor(data.draw(st.lists(st.integers(0, groups - 1), min_size=in_features, max_size=in_features)))
    q, z, s = slow.random_layer(out_features, in_features, groups, bits)
    packed = pack_gptq(q, z, s, bits, g_idx=g_idx, v2=v2)
    expected = slow.gptq_tensors(q, z, s, bits, g_idx=g_idx.tolist(), v2=v2)
    for name, tensor in expected.items():
        assert torch.equal(packed[name], tensor), name
    q2, z2, s2 = unpack_gptq(
        packed["qweight"], packed["qzeros"], packed["scales"], bits, in_features=in_features, v2=v2
    )
    assert torch.equal(q2, q)
    assert torch.equal(z2, z.short())
    assert torch.equal(s2, s)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_v1_without_zero_is_read_the_same_both_ways(bits):
    q, z, s = slow.random_layer(32, 64, 2, bits)
    z.clamp_(min=1)
    packed = pack_gptq(q, z, s, bits)
    for wordwise in (True, False):
        _, z2, _ = unpack_gptq(packed["qweight"], packed["qzeros"], packed["scales"], bits, wordwise=wordwise)
        assert torch.equal(z2, z.short())


@QUICK
@given(bits=BITS, words=st.integers(1, 3), in_features=st.integers(1, 70), groups=st.integers(1, 5))
def test_awq_gemm(bits, words, in_features, groups):
    q, z, s = slow.random_layer(32 * words, in_features, groups, bits, torch.bfloat16)
    packed = pack_gemm(q, z, s, bits)
    for name, tensor in slow.awq_gemm_tensors(q, z, s, bits).items():
        assert torch.equal(packed[name], tensor), name
    q2, z2, s2 = unpack_gemm(packed["qweight"], packed["qzeros"], packed["scales"], bits)
    assert torch.equal(q2, q)
    assert torch.equal(z2, z.short())
    assert torch.equal(s2, s)


@QUICK
@given(out_features=st.integers(1, 20), group=st.sampled_from([32, 64, 128]), groups=st.integers(1, 20))
def test_awq_gemv(out_features, group, groups):
    q, z, s = slow.random_layer(out_features, group * groups, groups, 4)
    packed = pack_gemv(q, z, s, group)
    multiple = {32: 32, 64: 16, 128: 8}[group]
    assert packed["scales"].shape == (out_features, -(-groups // multiple) * multiple)
    q2, z2, s2 = unpack_gemv(packed["qweight"], packed["qzeros"], packed["scales"], groups)
    assert torch.equal(q2, q)
    assert torch.equal(z2, z.short())
    assert torch.equal(s2, s)


@QUICK
@given(bits=BITS, out_features=st.integers(1, 40), in_features=st.integers(1, 70), groups=st.integers(1, 4))
def test_compressed_tensors(bits, out_features, in_features, groups):
    q, z, s = slow.random_layer(out_features, in_features, groups, bits)
    packed = pack_quantized(q, z, s, bits, symmetric=False)
    expected = slow.compressed_tensors(q, z, s, bits)
    assert set(packed) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(packed[name], tensor), name


def test_symmetric_zero_points_must_be_the_middle():
    q, z, s = slow.random_layer(8, 32, 1, 4)
    with pytest.raises(ValueError, match="every zero point 8"):
        pack_quantized(q, z, s, 4, symmetric=True)
    assert "weight_zero_point" not in pack_quantized(q, torch.full_like(z, 8), s, 4, symmetric=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_stream(torch.tensor([[16]]), 4), r"\[0, 15\]"),
        (lambda: pack_stream(torch.tensor([[-1]]), 4), r"\[0, 15\]"),
        (lambda: pack_stream(torch.tensor([[1.0]]), 4), "integers"),
        (lambda: pack_stream(torch.tensor([[1]]), 9), "bits=9"),
        (lambda: unpack_stream(torch.zeros(1, 1, dtype=torch.int32), 4, 9), "take 2 words"),
        (lambda: pack_planes(torch.zeros(1, 31, dtype=torch.uint8), 5), "blocks of 32"),
        (lambda: pack_gemm(*slow.random_layer(12, 8, 1, 4), 4), "out_features=12"),
        (lambda: pack_gptq(*slow.random_layer(8, 10, 3, 4), 4), "explicit g_idx"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_gemv_fast_with_zero_points_that_are_no_integers():
    qweight = torch.zeros(2, 64, dtype=torch.int16)
    scales = torch.full((8, 8), 0.1, dtype=torch.float16)
    folded = torch.full((8, 8), -0.15, dtype=torch.float16)
    with pytest.raises(ValueError, match="scale \\* integer"):
        unpack_gemv_fast(qweight, folded, scales, 1)


def test_a_7b_layer_unpacks_fast():
    q = torch.randint(0, 16, (11008, 4096), dtype=torch.uint8)
    z, s = torch.randint(0, 16, (11008, 32)), torch.rand(11008, 32).half()
    for pack, unpack in ((pack_gemm, unpack_gemm), (pack_gptq, unpack_gptq)):
        packed = pack(q, z, s, 4)
        best = 1e9
        for _ in range(2):
            start = time.process_time()
            back = unpack(packed["qweight"], packed["qzeros"], packed["scales"], 4)
            best = min(best, time.process_time() - start)
        assert torch.equal(back[0], q)
        assert best < 3.0, f"{unpack.__name__} took {best:.2f} s"

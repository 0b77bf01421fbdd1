"""Implementations of linear layers against QuantizedWeight.dequantize in float64."""

import platform
from dataclasses import replace

import pytest
import torch

from qengine.errors import UnsupportedError
from qengine.layers.activation import gated_activation
from qengine.layers.join import join_weights
from qengine.layers.linear import CANDIDATES, Linear, choose
from qengine.layers.linear_dense import DenseLinear
from qengine.layers.linear_fp16 import Fp16PackedLinear
from qengine.layers.linear_impl import LinearCase
from qengine.layers.linear_int4 import CpuInt4Linear
from qengine.layers.linear_packed import DequantizePerCall
from qengine.layers.linear_w4a16 import FusedGatedLinear, FusedLinear
from qengine.quant import PlainWeight, QuantizedWeight, QuantSpec

CPU = torch.device("cpu")
X86 = platform.machine().lower() in ("x86_64", "amd64")


def make_weight(n, k, bits=4, group=32, *, order=False, bias=True, scales=torch.float16, short_scales=False):
    """Random codes, zeros from 0 to 2**bits, groups shuffled over the columns if `order`."""
    size = k if group == -1 else group
    groups = -(-k // size)
    q = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits + 1, (n, groups), dtype=torch.int16)
    scale = torch.rand(n, groups) * 0.02 + 0.001
    if short_scales:  # 7 significant bits: every product with a difference of codes is a float16
        scale = scale.bfloat16().float()
        scale = (scale.view(torch.int32) & ~0x1FFFF).view(torch.float32)
    g_idx = (torch.arange(k, dtype=torch.int32) // size)[torch.randperm(k)] if order else None
    spec = QuantSpec(bits, group, False, order, "gptq", "gptq")
    return QuantizedWeight(q, scale.to(scales), zeros, spec, g_idx, torch.randn(n).to(scales) if bias else None)


def truth(weight, x):
    """x W^T + bias in float64."""
    dense = weight.weight if isinstance(weight, PlainWeight) else weight.dequantize()
    y = x.double() @ dense.double().t()
    return y if weight.bias is None else y + weight.bias.double()


def close(y, expected, dtype, k):
    """Within the rounding of `k` sums in float32 and of the result in `dtype`."""
    scale = expected.abs().max().item() + 1.0
    unit = {torch.float32: 2**-24 * k**0.5 * 4, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    return (y.double() - expected).abs().max().item() <= unit * scale


@pytest.mark.parametrize("implementation", [Fp16PackedLinear, DequantizePerCall, DenseLinear])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 64, 32), (5, 123, 41), (123, 5, -1), (17, 96, 16), (1, 1, -1)])
@pytest.mark.parametrize("order", [False, True])
def test_float32_over_bits_groups_orders_and_sizes(implementation, bits, n, k, group, order):
    weight = make_weight(n, k, bits, group, order=order)
    layer = implementation(weight, torch.float32, CPU)
    for rows in (1, 3, 33):
        x = torch.randn(rows, k)
        y = layer(x)
        assert y.dtype == torch.float32
        assert y.shape == (rows, n)
        assert close(y, truth(weight, x), torch.float32, k)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 70])
def test_int4_kernel_computes_with_exactly_the_dequantized_weights(group, order, rows):
    weight = make_weight(48, 2 * group, 4, group, order=order, short_scales=True)
    layer = CpuInt4Linear(weight, torch.float32, CPU)
    x = torch.randn(rows, 2 * group)
    assert close(layer(x), truth(weight, x), torch.float32, 2 * group)
    units = torch.eye(2 * group)[:rows]
    bias = weight.bias.float()
    assert torch.equal(layer(units), weight.dequantize().t()[:rows] + bias)


def test_int4_kernel_with_long_scales_differs_only_by_the_rounding_of_the_product():
    weight = make_weight(64, 128, 4, 64, bias=False)
    layer = CpuInt4Linear(weight, torch.float32, CPU)
    difference = (layer(torch.eye(128)).t() - weight.dequantize()).abs()
    assert 0 < difference.max() <= 2**-11 * weight.dequantize().abs().max()


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_int4_kernel_in_bfloat16(order, rows):
    weight = make_weight(64, 256, 4, 64, order=order, short_scales=True)
    layer = CpuInt4Linear(weight, torch.bfloat16, CPU)
    x = torch.randn(rows, 256).bfloat16()
    assert close(layer(x), truth(weight, x), torch.bfloat16, 256)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [False, True])
def test_dequantize_per_call_gives_the_numbers_of_dequantize(dtype, scales, order):
    for bits, n, k, group in ((4, 24, 64, 16), (3, 7, 45, 15), (8, 9, 33, -1)):
        weight = make_weight(n, k, bits, group, order=order, scales=scales)
        layer = DequantizePerCall(weight, dtype, CPU)
        assert torch.equal(layer.dequantize(), weight.dequantize(dtype))
        x = torch.randn(4, k, dtype=dtype)
        assert close(layer(x), truth(weight, x), torch.bfloat16 if dtype == torch.bfloat16 else dtype, k)


def test_ragged_last_group():
    weight = make_weight(16, 100, 4, 64)
    for implementation in (Fp16PackedLinear, DequantizePerCall, DenseLinear):
        x = torch.randn(3, 100)
        assert close(implementation(weight, torch.float32, CPU)(x), truth(weight, x), torch.float32, 100)
    assert "multiple of group_size" in CpuInt4Linear.why_not(LinearCase.of(weight, torch.bfloat16, CPU))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8}, "4 bits, not 8"),
        ({"group": 16}, "groups of 32, 64, 128, 256, not 16"),
        ({"n": 24}, "out_features=24 must be a multiple of 16"),
        ({"k": 96, "group": 64}, "in_features=96 must be a multiple of group_size=64"),
    ],
)
def test_int4_kernel_says_why_not(changes, words):
    weight = make_weight(**{"n": 32, "k": 64, "bits": 4, "group": 32, **changes})
    assert words in CpuInt4Linear.why_not(LinearCase.of(weight, torch.bfloat16, CPU))


def test_int4_kernel_refuses_groups_of_unequal_size():
    weight = make_weight(16, 64, 4, 32, order=True)
    weight.g_idx[weight.g_idx.tolist().index(0)] = 1
    assert "unequal" in CpuInt4Linear.why_not(LinearCase.of(weight, torch.bfloat16, CPU))


@pytest.mark.skipif(not X86, reason="the choice is for x86")
def test_choice_on_a_cpu():
    quantized, plain = make_weight(32, 64), PlainWeight(torch.randn(32, 64).half())
    inexact = PlainWeight(torch.randn(32, 64))
    for weight, dtype, expected in (
        (quantized, torch.float32, Fp16PackedLinear),
        (quantized, torch.bfloat16, CpuInt4Linear),
        (quantized, torch.float16, DenseLinear),
        (plain, torch.float32, Fp16PackedLinear),
        (plain, torch.bfloat16, DenseLinear),
        (inexact, torch.float32, DenseLinear),
        (PlainWeight(torch.tensor([[1e5]])), torch.float32, DenseLinear),
    ):
        assert choose(LinearCase.of(weight, dtype, CPU)) is expected


def test_choice_on_a_gpu_keeps_quantized_weights_packed():
    spec = QuantSpec(4, 64, True, False, "awq", "gemm")
    case = LinearCase((64, 128), spec, torch.float16, torch.float16, torch.device("cuda"))
    assert choose(case) is FusedLinear
    assert choose(replace(case, dtype=torch.float32)) is DequantizePerCall
    assert choose(replace(case, shape=(60, 128))) is DequantizePerCall
    assert choose(replace(case, quant=replace(spec, group_size=24))) is DequantizePerCall
    assert choose(replace(case, quant=replace(spec, group_size=-1))) is FusedLinear
    assert choose(LinearCase((64, 128), None, torch.float16, torch.float16, torch.device("cuda"))) is DenseLinear


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 64), (4, -1), (8, 128)])
def test_the_packed_form_of_the_gpu_kernel_holds_the_weights(bits, group, act_order):
    # On a CPU tensor the operator is its own plain-torch reference; the kernel is held against that on a GPU.
    weight = make_weight(48, 256, bits=bits, group=group, order=act_order)
    layer = FusedLinear(weight, torch.float16, CPU)
    x = torch.randn(5, 256, dtype=torch.float16)
    exact = x.double() @ weight.dequantize(torch.float64).T
    if weight.bias is not None:
        exact = exact + weight.bias.double()
    error = (layer(x).double() - exact).norm() / exact.norm()
    assert error < 1e-3


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_gated_layer_is_the_activation_of_its_first_half_times_the_second(name, act_order):
    weight, act = make_weight(96, 256, group=64, order=act_order), gated_activation(name)
    x = torch.randn(5, 256, dtype=torch.float16)
    both = truth(weight, x)
    expected = act(both[:, :48], both[:, 48:])
    fused = FusedGatedLinear(weight, torch.float16, CPU, name)  # on a CPU tensor by the operator's reference
    assert fused.shape == (96, 256)
    assert name in fused.describe()
    assert torch.equal(fused.bias, weight.bias), "set_weight keeps it for a weight in the usual order"
    linear = Linear("x", weight, dtype=torch.float32, device=CPU, gate=act)
    assert not linear._impl.gated
    for got in (fused(x), linear(x.float())):
        assert got.shape == (5, 48)
        assert (got.double() - expected).norm() / expected.norm() < 2e-3
    linear.set_weight(torch.zeros(96, 256))
    bias = weight.bias.float()
    assert torch.equal(linear(x.float()), act(bias[None, :48], bias[None, 48:]).expand(5, 48))


@pytest.mark.parametrize(("rows", "gated"), [(96, True), (72, False)])  # 36 rows of gate and of up are no eights
def test_the_kernel_gates_where_its_rows_can_be_paired(rows, gated, monkeypatch):
    monkeypatch.setattr("qengine.layers.linear.choose", lambda case: FusedLinear)
    weight = make_weight(rows, 256, group=64)
    linear = Linear("x", weight, dtype=torch.float16, device=CPU, gate=gated_activation("silu"))
    assert linear._impl.gated is gated
    x = torch.randn(5, 256, dtype=torch.float16)
    gate, up = truth(weight, x).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert (linear(x).double() - expected).norm() / expected.norm() < 2e-3


def test_without_a_fitting_implementation_all_reasons_are_given():
    spec = QuantSpec(4, 64, True, False, "awq", "gemm")
    case = LinearCase((64, 128), spec, torch.float16, torch.float16, torch.device("cuda"))
    with pytest.raises(UnsupportedError) as refusal:
        choose(case, (CpuInt4Linear, DenseLinear))
    text = str(refusal.value)
    assert "cpu-int4: for CPUs only" in text
    assert "dense: a quantized weight stays packed on cuda" in text


def test_every_candidate_has_a_name_of_its_own_and_describes_itself():
    assert len({candidate.name for candidate in CANDIDATES}) == len(CANDIDATES)
    for candidate in CANDIDATES:
        layer = candidate(make_weight(32, 64), torch.float16 if candidate is FusedLinear else torch.float32, CPU)
        assert layer.describe()
        assert layer.nbytes() >= 32 * 64 // 2
        assert layer.shape == (32, 64)


def test_observer_sees_inputs_and_set_weight_replaces():
    weight = make_weight(16, 32)
    linear = Linear("x", weight, dtype=torch.float32, device=CPU, split="columns")
    x, seen = torch.randn(3, 32), []
    linear.observer = seen.append
    linear(x)
    linear.observer = None
    linear(x)
    assert len(seen) == 1
    assert seen[0] is x
    replacement = torch.randn(16, 32)
    linear.set_weight(replacement)
    expected = PlainWeight(replacement, weight.bias)
    assert close(linear(x), truth(expected, x), torch.float32, 32)
    with pytest.raises(ValueError, match=r"x: .*\[16, 31\].*\[16, 32\]"):
        linear.set_weight(torch.randn(16, 31))


@pytest.mark.parametrize("order", [False, True])
def test_joined_weights_compute_what_the_parts_do(order):
    parts = [make_weight(n, 64, order=False, bias=n != 16) for n in (32, 16, 7)]
    if order:
        g_idx = (torch.arange(64, dtype=torch.int32) // 32)[torch.randperm(64)]
        for part in parts:
            part.g_idx = g_idx.clone()
    joined = join_weights(parts)
    x = torch.randn(5, 64)
    expected = torch.cat([truth(part, x) for part in parts], dim=1)
    assert close(DenseLinear(joined, torch.float32, CPU)(x), expected, torch.float32, 64)
    plain = [PlainWeight(torch.randn(n, 64), torch.randn(n) if n == 3 else None) for n in (3, 4)]
    expected = torch.cat([truth(part, x) for part in plain], dim=1)
    assert close(DenseLinear(join_weights(plain), torch.float32, CPU)(x), expected, torch.float32, 64)


def test_weights_of_different_forms_are_not_joined():
    base = make_weight(16, 64)
    for other in (
        make_weight(16, 64, bits=8),
        make_weight(16, 64, group=64),
        make_weight(16, 64, order=True),
        make_weight(16, 64, scales=torch.bfloat16),
        PlainWeight(torch.randn(16, 64)),
    ):
        assert join_weights([base, other]) is None
    assert join_weights([PlainWeight(torch.randn(2, 4)), PlainWeight(torch.randn(2, 4).half())]) is None

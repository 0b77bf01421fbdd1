"""Folding an act-order layer's column order into the layers before it changes no result, and leaves no order behind."""

import pytest
import torch

from qengine.kernels.w4a16 import W4A16Weight
from qengine.layers.join import fold_order, join_weights
from qengine.quant import PlainWeight, QuantizedWeight, QuantSpec

INNER, HIDDEN = 96, 64


def quantized(n, k, group, *, order=None, bias=False):
    size = group if group > 0 else k
    groups = -(-k // size)
    spec = QuantSpec(4, group, False, order is not None, "gptq", "gptq")
    index = None if order is None else (torch.arange(k) // size)[order].int()
    return QuantizedWeight(
        q=torch.randint(0, 16, (n, k), dtype=torch.uint8),
        scales=(torch.rand(n, groups) * 0.1 + 0.01).half(),
        zeros=torch.randint(0, 16, (n, groups), dtype=torch.int16),
        spec=spec,
        g_idx=index,
        bias=torch.randn(n).half() if bias else None,
    )


def plain(n, k, *, bias=False):
    return PlainWeight(torch.randn(n, k), torch.randn(n) if bias else None)


def apply(weight, x):
    matrix = weight.weight if isinstance(weight, PlainWeight) else weight.dequantize()
    return x @ matrix.double().T + (0 if weight.bias is None else weight.bias.double())


def mlp(inputs, output, x):
    both = torch.cat([apply(part, x) for part in inputs], dim=1)
    gate, up = both.chunk(2, dim=1)
    return apply(output, torch.nn.functional.silu(gate) * up)


INPUTS = {
    "plain": lambda: [plain(INNER, HIDDEN, bias=True), plain(INNER, HIDDEN)],
    "quantized": lambda: [quantized(INNER, HIDDEN, 16, bias=True), quantized(INNER, HIDDEN, 16, bias=True)],
    "act-order": lambda: [quantized(INNER, HIDDEN, 16, order=o) for o in [torch.randperm(HIDDEN)] * 2],
    "mixed": lambda: [plain(INNER, HIDDEN), quantized(INNER, HIDDEN, 32)],
    "stacked": lambda: [quantized(2 * INNER, HIDDEN, 16, bias=True)],
    "stacked plain": lambda: [plain(2 * INNER, HIDDEN)],
}


@pytest.mark.parametrize("kind", list(INPUTS))
@pytest.mark.parametrize("group", [16, 32, 40])  # 96 columns in groups of 40: the last is short
def test_results_stay_and_no_order_is_left(kind, group):
    inputs, output = INPUTS[kind](), quantized(HIDDEN, INNER, group, order=torch.randperm(INNER), bias=True)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    before = mlp(inputs, output, x)
    folded, last = fold_order(inputs, output)
    torch.testing.assert_close(mlp(folded, last, x), before, rtol=1e-12, atol=1e-12)
    assert last.g_idx is None
    assert not last.spec.desc_act
    assert not torch.equal(last.q, output.q)


def test_the_packed_layout_then_needs_no_permutation():
    output = quantized(HIDDEN, INNER, 32, order=torch.randperm(INNER))
    packed = [
        W4A16Weight.pack(w.q, w.scales, w.zeros, w.g_idx, 4, 32, "cpu")
        for w in (output, fold_order([plain(INNER, HIDDEN)], output)[1])
    ]
    assert packed[0].perm is not None
    assert packed[1].perm is None


def test_joined_inputs_can_be_folded_before_or_after_joining():
    inputs = INPUTS["act-order"]()
    output = quantized(HIDDEN, INNER, 16, order=torch.randperm(INNER))
    first = join_weights(fold_order(inputs, output)[0])
    second = fold_order([join_weights(inputs)], output)[0][0]
    for name in ("q", "scales", "zeros", "g_idx"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(
    "output",
    [
        plain(HIDDEN, INNER),
        quantized(HIDDEN, INNER, 32),
        quantized(HIDDEN, INNER, 32, order=torch.arange(INNER)),
        quantized(HIDDEN, INNER, -1, order=torch.randperm(INNER)),
    ],
    ids=["plain", "in order", "named order", "one group"],
)
def test_what_has_no_order_is_left_alone(output):
    inputs = INPUTS["mixed"]()
    folded, last = fold_order(inputs, output)
    assert last is output
    assert all(a is b for a, b in zip(folded, inputs, strict=True))


def test_unequal_groups_are_left_alone():
    output = quantized(HIDDEN, INNER, 32, order=torch.randperm(INNER))
    output.g_idx[0] = (output.g_idx[0] + 1) % 3
    assert fold_order([plain(INNER, HIDDEN)], output)[1] is output

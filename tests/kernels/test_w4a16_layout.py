"""The packed layout: an exact inverse, any group order, what is refused; and the CPU path of the operator."""

import packed_cases
import pytest
import torch
from packed_cases import Case

from qengine.kernels.fused.ref import ACTIVATIONS
from qengine.kernels.w4a16 import W4A16Weight, dequantize_ref, paired_rows, w4a16_gated, w4a16_linear
from qengine.kernels.w4a16.layout import _pack_words, unpack_words


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_every_code(bits: int) -> None:
    q = torch.randint(0, 2**bits, (48, 256), dtype=torch.uint8)
    assert torch.equal(unpack_words(_pack_words(q, bits), bits), q)


def test_a_word_holds_the_codes_that_its_docstring_names() -> None:
    q = torch.zeros(16, 128, dtype=torch.uint8)
    half, row, quad, pair, code, low = 1, 5, 3, 2, 3, 1
    q[8 * half + row, 32 * code + 8 * pair + 2 * quad + low] = 9
    words = _pack_words(q, 4).view(2, 8, 4, 4)
    assert int(words[half, row, quad, pair]) & 0xFFFFFFFF == 9 << (4 * code + 16 * low)
    assert int((words != 0).sum()) == 1


@pytest.mark.parametrize("group", [16, 48, 64, 128, 256, 96, -1])
@pytest.mark.parametrize("act_order", [False, True])
def test_dequantize_gives_the_exact_weights(group: int, act_order: bool) -> None:
    case = Case(24, 384, 4, group=group, act_order=act_order)
    x, weight, _, exact = packed_cases.make(case)
    assert packed_cases.error(x.double() @ dequantize_ref(weight).double().T, exact) < 1e-6


def test_unequal_groups_are_filled_up() -> None:
    g_idx = torch.tensor([0] * 5 + [2] * 30 + [1] * 13, dtype=torch.int32)[torch.randperm(48)]
    q = torch.randint(0, 16, (16, 48), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 16, (16, 3)), torch.rand(16, 3).half()
    weight = W4A16Weight.pack(q, scales, zeros, g_idx, 4, 16, "cpu")
    index = g_idx.long()
    expected = (q.float() - zeros.float()[:, index]) * scales.float()[:, index]
    assert torch.equal(dequantize_ref(weight), expected)


@pytest.mark.parametrize("factor", [2.0**-20, 1.0, 2.0**14])
def test_scales_far_from_one_stay_exact(factor: float) -> None:
    q = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    scales = ((torch.rand(16, 1) + 0.5) * factor).bfloat16()
    weight = W4A16Weight.pack(q, scales, torch.full((16, 1), 8), None, 4, -1, "cpu")
    assert torch.equal(dequantize_ref(weight), (q.float() - 8) * scales.float())


def test_negative_and_zero_scales_are_kept() -> None:
    q = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    for scales in (torch.zeros(16, 1).half(), -torch.rand(16, 1).half()):
        weight = W4A16Weight.pack(q, scales, torch.full((16, 1), 16), None, 4, 128, "cpu")
        assert torch.equal(dequantize_ref(weight), (q.float() - 16) * scales.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 1}, "2 to 8"),
        ({"q": torch.zeros(16, 120, dtype=torch.int32)}, "uint8"),
        ({"q": torch.zeros(12, 128, dtype=torch.uint8)}, "multiples of 8"),
        ({"q": torch.zeros(16, 64, dtype=torch.uint8), "group_size": 8}, "scales a row"),
        ({"group_size": 0}, "group_size=0"),
        ({"scales": torch.zeros(16, 2).half()}, "scales a row"),
        ({"zeros": torch.full((16, 1), -1)}, "zero points"),
        ({"dtype": torch.float32}, "float16 and bfloat16"),
        ({"g_idx": torch.full((128,), 3)}, "g_idx"),
    ],
)
def test_what_cannot_be_packed_is_refused(change: dict, message: str) -> None:
    arguments = {
        "q": torch.zeros(16, 128, dtype=torch.uint8),
        "scales": torch.ones(16, 1).half(),
        "zeros": torch.full((16, 1), 8),
        "g_idx": None,
        "bits": 4,
        "group_size": 128,
        "device": "cpu",
    }
    with pytest.raises(ValueError, match=message):
        W4A16Weight.pack(**{**arguments, **change})


def test_groups_of_eight_are_refused() -> None:
    q, scales = torch.zeros(16, 128, dtype=torch.uint8), torch.ones(16, 16).half()
    with pytest.raises(ValueError, match="multiples of 16"):
        W4A16Weight.pack(q, scales, torch.zeros(16, 16, dtype=torch.int16), None, 4, 8, "cpu")


def test_the_operator_serves_cpu_tensors_by_the_reference_and_has_a_fake() -> None:
    case = Case(48, 256, 3, bias=True)
    x, weight, bias, exact = packed_cases.make(case)
    assert packed_cases.error(w4a16_linear(x, weight, bias), exact) < packed_cases.TOLERANCE[torch.float16]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = torch.ops.qengine.w4a16_linear(
            mode.from_tensor(x), weight.words, weight.scales_zeros, None, None, 48, 4, 128, 1.0
        )
        z = torch.ops.qengine.w4a16_linear(
            mode.from_tensor(x), weight.words, weight.scales_zeros, None, None, 48, 4, 128, 1.0, "silu"
        )
    assert (y.shape, z.shape) == ((3, 48), (3, 24))
    assert y.dtype == z.dtype == torch.float16


def test_the_operator_refuses_another_width() -> None:
    x, weight, _, _ = packed_cases.make(Case(16, 128, 2))
    with pytest.raises(ValueError, match=r"\[rows, 128\]"):
        w4a16_linear(x[:, :64], weight)


def test_paired_rows_put_eight_of_gate_before_their_eight_of_up() -> None:
    rows = paired_rows(24).view(-1, 2, 8)
    assert torch.equal(rows[:, 0].flatten(), torch.arange(24))
    assert torch.equal(rows[:, 1], rows[:, 0] + 24)
    with pytest.raises(ValueError, match="20 rows; multiples of 8"):
        paired_rows(20)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_the_gated_operator_gates_the_product(name: str) -> None:
    x, weight, bias, exact = packed_cases.make(Case(48, 256, 3, bias=True))
    gate, up = exact.view(3, 3, 2, 8).unbind(2)
    truth = ACTIVATIONS[name](gate.flatten(1)) * up.flatten(1)
    got = w4a16_gated(x, weight, bias, name)
    assert got.shape == (3, 24)
    assert packed_cases.error(got, truth) < 2 * packed_cases.TOLERANCE[torch.float16]


def test_the_gated_operator_refuses_what_it_does_not_know() -> None:
    x, weight, _, _ = packed_cases.make(Case(24, 128, 2))
    with pytest.raises(ValueError, match=r"'sinc' is not supported; known are silu"):
        w4a16_gated(x, weight, None, "sinc")
    with pytest.raises(ValueError, match="24 rows together; multiples of 16"):
        w4a16_gated(x, weight, None, "silu")
    with pytest.raises(ValueError, match=r"\[rows, 128\]"):
        w4a16_gated(x[:, :64], weight, None, "silu")

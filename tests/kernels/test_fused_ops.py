"""The references of the fused operators against float64, the operators' fakes, and what they refuse."""

import pytest
import torch
from fused_cases import BF16, F16, F32, NORMS, NormCase, angles_want, make_norm, matrix, wrong
from torch._subclasses.fake_tensor import FakeTensorMode

from qengine.kernels.fused import card, norm, ops, ref
from qengine.kernels.fused.activation import KINDS, launch_for
from qengine.layers.activation import ACTIVATIONS
from qengine.layers.rope import Rope, RopeSpec

OPS = torch.ops.qengine


@pytest.mark.parametrize("case", [c for c in NORMS if not (c.form.startswith("norm_add") and c.second)], ids=str)
def test_norms_on_the_cpu_match_float64(case: NormCase) -> None:
    made = make_norm(case)
    h, d, w, b, out = made.hidden, made.delta, made.weight, made.bias, case.out
    if case.form == "norm":
        got = ops.layer_norm(h, w, b, made.eps, out) if case.kind == "layer" else ops.rms_norm(h, w, made.eps, out)
    elif case.form == "add" and case.kind == "layer":
        got = ops.add_layer_norm(h, d, w, b, made.eps, out, made.second)
    elif case.form == "add":
        got = ops.add_rms_norm(h, d, w, made.eps, out, made.second)
    elif case.form == "norm_add":
        got = ops.norm_add(h, d, made.inner, made.inner_eps)
    else:
        got = ops.norm_add_norm(h, d, made.inner, made.inner_eps, w, made.eps, out)
    assert not wrong(h, made.want_hidden, ulps=2.0)
    if made.want is None:
        assert got is None
    else:
        assert not wrong(got, made.want, ulps=2.0)


def test_a_norm_in_place_on_the_cpu() -> None:
    x, w = matrix(3, 48, F16, "cpu"), torch.rand(48).half()
    want = ref.rms_norm(x, w, 1e-5)
    ops.rms_norm_(x, w, 1e-5)
    assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", KINDS)
def test_gated_activations_are_the_layers_own(name: str, dtype: torch.dtype) -> None:
    joined = torch.randn(3, 46).to(dtype)
    gate, up = joined[:, :23], joined[:, 23:]
    assert torch.equal(ops.act_and_mul(joined, name), ACTIVATIONS[name](gate) * up)
    assert torch.equal(ops.act_and_mul((gate, up), name), ACTIVATIONS[name](gate) * up)


def test_every_activation_has_a_kernel() -> None:
    assert set(KINDS) == set(ACTIVATIONS) == set(ref.ACTIVATIONS)


def test_embedding_rows_of_unknown_ids_are_zero() -> None:
    table = torch.randn(5, 8).to(BF16)
    got = ops.embed(torch.tensor([4, -1, 5, 0]), table, 3.3, F16)
    assert torch.equal(got[[0, 3]], table[[4, 0]].half() * 3.3)
    assert not got[[1, 2]].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_angles_are_those_of_the_rope_layer(kind: str, interleaved: bool) -> None:
    params = {"factor": 4.0, "original_max_position_embeddings": 2048}
    rope = Rope(RopeSpec(kind, 1e4, 24, interleaved, params), torch.device("cpu"))
    positions = torch.randint(0, 100_000, (9,))
    factor = rope._frequencies.attention_factor
    assert (factor != 1.0) == (kind == "yarn")
    for dtype in (F32, F16):
        want = rope.rotary(positions, None, dtype)
        cos, sin = ops.rotary_angles(positions, rope._frequencies.base, factor, dtype, interleaved)
        assert torch.equal(cos, want.cos)
        assert torch.equal(sin, want.sin)
    exact = angles_want(positions, rope._frequencies.base, factor, interleaved)
    cos, sin = ops.rotary_angles(positions, rope._frequencies.base, factor, F32, interleaved)
    assert (cos[:, 0] - exact[0]).abs().max() < 3e-7
    assert (sin[:, 0] - exact[1]).abs().max() < 3e-7


def samples() -> dict:
    """Arguments of each operator."""
    h, d, w = torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.rand(16).half()
    table, ids = torch.randn(9, 16), torch.tensor([0, 8, 3])
    return {
        OPS.norm: (h, w, None, 1e-5, F32, "rms"),
        OPS.rms_norm_: (h, w, 1e-5),
        OPS.add_norm: (h, d, d, w, w, 1e-5, F16, "layer"),
        OPS.norm_add: (h, d, w, 1e-5),
        OPS.norm_add_norm: (h, d, w, 1e-5, w, 1e-6, BF16),
        OPS.act_and_mul: (h, d, "silu"),
        OPS.embed: (ids, table, 2.0, F16),
        OPS.rotary_angles: (ids, torch.rand(8), 1.5, F16, True),
    }


@pytest.mark.parametrize("op", list(samples()), ids=str)
def test_an_operator_has_a_true_schema_and_fake(op) -> None:
    torch.library.opcheck(op.default, samples()[op], test_utils=("test_schema", "test_faketensor"))


def test_a_cuda_tensor_never_reaches_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "norm_add", "norm_add_norm", "act_and_mul",
                 "embed", "rotary_angles"):  # fmt: skip
        monkeypatch.setattr(ref, name, lambda *args, name=name: pytest.fail(f"{name} reached the reference"))
    with FakeTensorMode():
        h, d = (torch.empty(3, 16, dtype=F16, device="cuda") for _ in range(2))
        w, ids = torch.empty(16, dtype=F16, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
        assert ops.rms_norm(h, w, 1e-5).dtype == F16
        assert ops.rms_norm(h, w, 1e-5, F32).dtype == F32
        assert ops.layer_norm(h, None, None, 1e-5).shape == (3, 16)
        assert ops.add_rms_norm(h, d, w, 1e-5, BF16).dtype == BF16
        assert ops.add_layer_norm(h, d, w, w, 1e-5, second=d).device.type == "cuda"
        assert ops.norm_add(h, d, w, 1e-5) is None
        assert ops.norm_add_norm(h, d, w, 1e-5, w, 1e-5).shape == (3, 16)
        assert ops.act_and_mul((h, d), "gelu").shape == (3, 16)
        assert ops.embed(ids, torch.empty(5, 7, device="cuda"), 1.0, F16).shape == (3, 7)
        cos, sin = ops.rotary_angles(ids, torch.empty(3, 8, device="cuda"), 1.0, F16, False)
        assert cos.shape == sin.shape == (3, 1, 16)


def test_what_does_not_fit_is_refused() -> None:
    def cuda(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        # made, not sliced: a build of torch without CUDA can make such tensors, but no views of them
        h, w, ids = cuda(3, 16), cuda(16), cuda(3, dtype=torch.int64)
        spread = torch.empty_strided((16,), (0,), dtype=F16, device="cuda")
        frequencies = cuda(8, dtype=F32)
        for text, call in {
            r"one shape .*got \[16, 3\]": lambda: ops.add_rms_norm(h, cuda(16, 3), w, 1e-5),
            r"strides \[1, 3\]": lambda: ops.norm_add(torch.empty_strided((3, 16), (1, 3), device="cuda"), h, w, 1e-5),
            r"dense \[16\], got \[8\]": lambda: ops.rms_norm(h, cuda(8), 1e-5),
            r"dense \[16\], got \[16\] with strides \[0\]": lambda: ops.rms_norm(h, spread, 1e-5),
            r"1 to 16384 values, got 20000": lambda: ops.rms_norm(cuda(1, 20000), None, 1e-5),
            r"a bias needs a weight": lambda: ops.layer_norm(h, None, w, 1e-5),
            r"bias of torch.float16 and a weight of torch.float32": lambda: ops.layer_norm(
                h, cuda(16, dtype=F32), w, 1e-5
            ),
            r"on one CUDA device, got cpu": lambda: ops.rms_norm(h, torch.empty(16), 1e-5),
            r"got torch.float64": lambda: ops.rms_norm(cuda(3, 16, dtype=torch.float64), w, 1e-5),
            r"2 \* size\], got \[3, 15\]": lambda: ops.act_and_mul(cuda(3, 15), "silu"),
            r"'sinc' is not supported; known are silu": lambda: ops.act_and_mul((h, h), "sinc"),
            r"both must be of one dtype": lambda: ops.act_and_mul((h, cuda(3, 16, dtype=F32)), "silu"),
            r"ids must be int64 or int32": lambda: ops.embed(cuda(3), h, 1.0, F16),
            r"result torch.int8": lambda: ops.embed(ids, h, 1.0, torch.int8),
            r"positions must be int64": lambda: ops.rotary_angles(cuda(3), frequencies, 1.0, F16, False),
            r"inverse frequencies must be float32": lambda: ops.rotary_angles(ids, h, 1.0, F16, False),
            r"got torch.int64": lambda: ops.rotary_angles(ids, frequencies, 1.0, torch.int64, False),
        }.items():
            with pytest.raises(ValueError, match=text):
                call()
    with pytest.raises(ValueError, match="known are silu"):
        ops.act_and_mul(torch.zeros(2, 4), "sinc")


@pytest.mark.parametrize("size", [1, 3, 64, 576, 3584, 4096, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 512, 4096])
def test_a_launch_fits_a_turing_multiprocessor(size: int, rows: int) -> None:
    for widths in ({2}, {2, 4}, {4}):
        shape = norm.shape_for(size, rows, widths)
        assert size <= shape.block < 2 * size + 1
        assert 1 <= shape.warps <= 32
        assert shape.block // (32 * shape.warps) <= 32, "more values a thread than it has registers for"
        assert (shape.vector == 4) == (len(widths) > 1)
    block, warps = launch_for(size, rows)
    assert block % 32 == 0
    assert 1 <= warps <= 8


def test_only_later_cards_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card.dependent_launch(torch.device("cpu")) is False
    for sm, expected in ((75, False), (89, False), (90, True), (120, True)):
        monkeypatch.setattr(card, "capability", lambda device, sm=sm: sm)
        assert card.dependent_launch(torch.device("cuda", 0)) is expected
    assert card.launch_options(False) == {}

"""The fused operators on a GPU: natively, and through sm_75 code generation with TRITON_OVERRIDE_ARCH=sm75."""

import pytest
import torch
from fused_cases import BF16, F16, F32, NORMS, ULP, NormCase, angles_want, beside, gates, make_norm, matrix, wrong

from qengine.kernels.fused import ops, ref
from qengine.kernels.fused.activation import KINDS, run_act_and_mul
from qengine.kernels.fused.embedding import run_embedding
from qengine.kernels.fused.norm import Shape, run_norm
from qengine.kernels.fused.rotary import run_rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    *NORMS,
    *[NormCase(form, rows, size) for form in ("norm", "add") for rows, size in ((1, 4096), (300, 3584), (700, 576))],
    *[NormCase("add", 2, size, BF16, BF16, BF16) for size in (1, 64, 5120, 8192, 16384)],
    *[NormCase("norm_add_norm", 5, size, F32, F32, F16, delta=F16, scale=7e4) for size in (2304, 5376, 8200, 16384)],
    *[NormCase("add", 600, 2560, k, k, k, kind="layer", bias=True, second=True) for k in (F16, BF16, F32)],
    NormCase("norm_add", 600, 5120, BF16, BF16, BF16),
    NormCase("add", 4, 12345, kind="layer", weight=None),
]


def poisoned(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, size + 16), float("nan"), device="cuda").to(dtype)[:, 8:-8]


def run_case(case: NormCase, shape: Shape | None = None) -> None:
    made = make_norm(case, "cuda")
    out = None if made.want is None else poisoned(case.rows, case.size, case.out)
    options = {"delta": made.delta, "second": made.second, "inner": made.inner, "inner_eps": made.inner_eps}
    run_norm(made.hidden, out, made.weight, made.bias, made.eps, case.kind, **options, shape=shape)
    assert beside(made.hidden), "wrote beside hidden's rows"
    assert not wrong(made.hidden, made.want_hidden, ulps=2.0)
    if out is not None:
        assert beside(out), "wrote beside the result's rows"
        assert not wrong(out, made.want, ulps=2.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms_match_float64(case: NormCase) -> None:
    run_case(case)


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("vector", "early"), [(0, True), (4, False)])
def test_every_launch_of_a_norm_gives_the_same(warps: int, vector: int, early: bool) -> None:
    run_case(NormCase("norm_add_norm", 3, 1500, F32, F32, F16, delta=F16), Shape(2048, vector, early, warps))
    run_case(NormCase("add", 3, 1500, second=True, kind="layer", bias=True), Shape(2048, vector, early, warps))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_operators_match_the_references_on_the_device(dtype: torch.dtype) -> None:
    w, inner, b = (matrix(1, 720, dtype, "cuda")[0].contiguous() for _ in range(3))
    x, delta = matrix(9, 720, dtype, "cuda"), matrix(9, 720, dtype, "cuda")
    for ours, theirs, args in (
        (ops.add_rms_norm, ref.add_rms_norm, (delta, w, 1e-5, F16)),
        (ops.add_layer_norm, ref.add_layer_norm, (delta, w, b, 1e-5, BF16, delta)),
        (ops.norm_add_norm, ref.norm_add_norm, (delta, inner, 1e-6, w, 1e-5)),
        (ops.rms_norm, ref.rms_norm, (w, 1e-5)),
        (ops.rms_norm, ref.rms_norm, (None, 1e-5, F32)),
        (ops.layer_norm, ref.layer_norm, (w, b, 1e-5, F16)),
        (ops.norm_add, ref.norm_add, (delta, w, 1e-5)),
        (ops.rms_norm_, lambda x, w, eps: x.copy_(ref.rms_norm(x, w, eps)), (w, 1e-5)),
    ):
        mine, plain = x.clone(), x.clone()
        got, want = ours(mine, *args), theirs(plain, *args)
        assert not wrong(mine, plain, ulps=2.0), ours
        if got is not None:
            assert got.dtype == want.dtype
            # what is rounded to x's dtype and then widened is as far off as that dtype's numbers lie apart
            coarse = dtype if want.dtype == F32 else want.dtype
            assert torch.equal(got, got.to(coarse).to(got.dtype))
            assert not wrong(got.to(coarse), want.to(coarse), ulps=2.0), ours
    assert ops.rms_norm(x[:0], w, 1e-5).shape == (0, 720)


def test_rms_norm_in_place_keeps_the_columns_beside_it() -> None:
    qkv = torch.randn(5, 3 * 640, device="cuda", dtype=F16)
    before, w = qkv.clone(), torch.rand(640, device="cuda", dtype=F16)
    ops.rms_norm_(qkv[:, 640:1280], w, 1e-6)
    assert not wrong(qkv[:, 640:1280], ref.rms_norm(before[:, 640:1280], w, 1e-6))
    assert torch.equal(qkv[:, :640], before[:, :640])
    assert torch.equal(qkv[:, 1280:], before[:, 1280:])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", {kind: name for name, kind in KINDS.items()}.values())
def test_activations_have_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    for rows, size in ((5, 1000), (900, 1536)):
        gate, up, out = gates(rows, size, dtype, "cuda"), matrix(rows, size, dtype, "cuda"), poisoned(rows, size, dtype)
        run_act_and_mul(gate, up, out, name)
        want = ref.act_and_mul(gate, up, name)
        assert beside(out), "wrote beside its rows"
        exact = torch.ones_like(gate, dtype=torch.bool)
        if KINDS[name] == "gelu":
            # the two libraries' erf differ in their last place: see activation.py
            torch.testing.assert_close(out, want, rtol=2 * ULP[dtype], atol=2e-6)
            exact = gate > -1
        if dtype == F32:
            torch.testing.assert_close(out[exact], want[exact], rtol=2e-6, atol=1e-9)
        else:
            assert not wrong(out[exact], want[exact], share=1e-3)
    joined = torch.randn(5, 2 * 1000, device="cuda").to(dtype)
    assert torch.equal(ops.act_and_mul(joined, name), ops.act_and_mul((joined[:, :1000], joined[:, 1000:]), name))
    assert not wrong(ops.act_and_mul(joined, name), ref.act_and_mul(joined[:, :1000], joined[:, 1000:], name))


@pytest.mark.parametrize(("rows", "size"), [(3, 1000), (900, 1536)])
def test_gate_and_up_may_lie_in_eights_by_turns(rows: int, size: int) -> None:
    both, out = matrix(rows, 2 * size, F16, "cuda"), poisoned(rows, size, F16)
    run_act_and_mul(both, both[:, 8:], out, "silu", paired=True)
    gate, up = (part.flatten(1) for part in both.reshape(rows, -1, 2, 8).unbind(2))
    assert beside(out), "wrote beside its rows"
    assert torch.equal(out, ops.act_and_mul((gate, up), "silu"))


def test_activations_of_what_is_not_finite() -> None:
    gate = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], device="cuda", dtype=F16)
    up = torch.tensor([[1.0, 2.0, 2.0, float("nan")]], device="cuda", dtype=F16)
    for name in KINDS:
        got, want = ops.act_and_mul((gate, up), name), ref.act_and_mul(gate, up, name)
        assert torch.equal(got.nan_to_num(1e3), want.nan_to_num(1e3)), (name, got, want)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtypes", [(a, b) for a in (F16, BF16, F32) for b in (F16, BF16, F32)], ids=str)
def test_embeddings_are_those_of_torch(dtypes: tuple[torch.dtype, torch.dtype], pinned: bool) -> None:
    table = torch.randn(1000, 1100).to(dtypes[0])
    known = torch.randint(0, 1000, (300,))
    ids = torch.cat((torch.tensor([-1, 1000, 2**62, -(2**62)]), known)).cuda()
    held = table.pin_memory() if pinned else table.cuda()
    for scale in (1.0, 59.875):
        got = ops.embed(ids, held, scale, dtypes[1])
        assert torch.equal(got.cpu()[4:], ref.embed(known, table, scale, dtypes[1]))
        assert not got[:4].any()
    out = poisoned(len(ids), 1100, dtypes[1])
    run_embedding(ids.int(), held, 1.0, out)
    assert beside(out)
    assert torch.equal(out[4:].cpu(), ref.embed(known, table, 1.0, dtypes[1]))


def test_a_pageable_table_is_refused() -> None:
    with pytest.raises(ValueError, match="pin it"):
        ops.embed(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(4, 8), 1.0, F16)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [64, 48, 13])
def test_angles_are_right_at_a_million_tokens(half: int, interleaved: bool) -> None:
    high = torch.cat((torch.arange(131072 * 8 - 600, 131072 * 8), torch.arange(600), torch.randint(0, 2**20, (4000,))))
    positions, inverse = high.cuda(), (1 / 10000.0 ** (torch.arange(half) / half)).cuda()
    for inverse_rows in (inverse, inverse * torch.rand(len(high), 1, device="cuda")):
        want = angles_want(positions, inverse_rows, 1.25, interleaved)
        cos, sin = ops.rotary_angles(positions, inverse_rows, 1.25, F32, interleaved)
        assert cos.shape == (len(high), 1, 2 * half)
        worst = max(
            float((a[:, 0].cpu().double() - b.cpu()).abs().max()) for a, b in zip((cos, sin), want, strict=True)
        )
        assert worst < 1.25 * 1.1e-7, worst
        for dtype in (F16, BF16):
            got = ops.rotary_angles(positions.int(), inverse_rows, 1.25, dtype, interleaved)
            plain = ref.rotary_angles(positions, inverse_rows, 1.25, dtype, interleaved)
            assert not any(wrong(a, b, share=2e-3) for a, b in zip(got, plain, strict=True))
    cos = torch.full((3, 1, 26), float("nan"), device="cuda")
    run_rotary(positions[:2], inverse[:13].contiguous(), 1.0, cos[:2], torch.empty_like(cos[:2]), False)
    assert cos[2].isnan().all()


def test_a_captured_graph_gives_the_eager_bits() -> None:
    ids, positions = torch.randint(0, 50, (4,), device="cuda"), torch.randint(0, 9000, (4,), device="cuda")
    table = torch.randn(50, 512).half().pin_memory()
    w = torch.rand(512, device="cuda", dtype=F16)
    inverse = (1 / 10000.0 ** (torch.arange(32) / 32)).cuda()

    def step() -> list[torch.Tensor]:
        hidden = ops.embed(ids, table, 2.0, F16)
        x = ops.rms_norm(hidden, w, 1e-5, F16)
        x = ops.add_rms_norm(hidden, x, w, 1e-5, F16)
        x = ops.act_and_mul(torch.cat((x, x), dim=1), "silu")
        y = ops.norm_add_norm(hidden, x, w, 1e-5, w, 1e-5, F16)
        return [hidden, y, *ops.rotary_angles(positions, inverse, 1.0, F16, False)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for turn in range(3):
            ids.copy_(torch.randint(0, 50, (4,)))
            positions.copy_(torch.randint(0, 9000, (4,)))
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(captured, step(), strict=True):
                assert torch.equal(a, b), turn


def test_a_chain_of_dependent_launches_keeps_its_order() -> None:
    hidden = torch.randn(64, 4096, device="cuda", dtype=F16)
    w = torch.rand(4096, device="cuda", dtype=F16)
    plain, x, y = hidden.clone(), hidden * 0.1, hidden * 0.1
    for _ in range(200):
        x = ops.add_rms_norm(hidden, x, w, 1e-5, F16)
        x = ops.act_and_mul((x, x), "tanh")
    torch.cuda.synchronize()
    for _ in range(200):
        y = ops.add_rms_norm(plain, y, w, 1e-5, F16)
        torch.cuda.synchronize()
        y = ops.act_and_mul((y, y), "tanh")
        torch.cuda.synchronize()
    assert torch.equal(hidden, plain)
    assert torch.equal(x, y)

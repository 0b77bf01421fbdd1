"""The packed GEMM on a GPU: natively, and through sm_75 code generation with TRITON_OVERRIDE_ARCH=sm75."""

import dataclasses

import packed_cases
import pytest
import torch
import triton
from fused_cases import wrong
from packed_cases import Case

from qengine.kernels.fused.activation import KINDS
from qengine.kernels.fused.ops import act_and_mul
from qengine.kernels.fused.ref import ACTIVATIONS
from qengine.kernels.launch import Launch
from qengine.kernels.w4a16 import (
    W4A16Weight,
    dequantize,
    dequantize_ref,
    linear_ref,
    reserve,
    w4a16_gated,
    w4a16_linear,
)
from qengine.kernels.w4a16.ops import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TURING = triton.knobs.runtime.override_arch == "sm75" or (
    torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 5)
)
BF16 = [] if TURING else [torch.bfloat16]

CASES = [
    *[Case(576, 576, m, group=64, bias=True) for m in (1, 2, 9, 17, 64, 65, 300)],
    *[Case(1536, 576, 5, bits=b, group=g) for b in (4, 8) for g in (16, 32, 64, 128, 256, -1)],
    *[Case(200, 1032, 33, bits=b, group=g) for b in (4, 8) for g in (16, 64, -1)],
    *[Case(264, 512, m, group=g, act_order=True) for m in (3, 40, 1200) for g in (32, 128)],
    *[Case(128, 640, 7, bits=b, group=32, act_order=True, bias=True) for b in (2, 3, 8)],
    *[Case(8, 8, 1, group=-1), Case(24, 136, 2, group=-1), Case(4096, 11008, 1), Case(3584, 18944, 16)],
    *[Case(320, 768, m, dtype=d, bits=b) for d in BF16 for m in (1, 16, 100, 2100) for b in (4, 8)],
    *[Case(1000, 1024, m) for m in (128, 512, 2048, 5000)],
]
COPIES = [] if TURING else [2, 4]
PDL = [1, 2] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not TURING else []
LAUNCHES = [
    *[Launch(bm=8, bn=bn, warps=w, stages=1, prefetch=p) for bn, w in ((32, 2), (64, 4), (128, 4)) for p in (0, 1)],
    *[Launch(bm=bm, bn=64, split=3, warps=4, stages=1, scaled=s) for bm in (16, 32) for s in (0, 1)],
    *[Launch(bm=64, bn=128, split=2, warps=4, stages=1, scaled=s, halves=h) for s in (0, 1) for h in (0, 1)],
    *[Launch(bm=64, bn=128, split=2, warps=4, stages=s, scaled=True) for s in COPIES],
    *[Launch(bm=8, bn=64, split=8, warps=4, stages=s) for s in COPIES],
    *[Launch(bm=8, bn=64, split=3, whole=2, prefetch=2), Launch(bm=64, bn=64, split=2, whole=5, scaled=True)],
    *[Launch(bm=16, bn=64, split=2, prefetch=1, pdl=p) for p in PDL],
    *[Launch(bm=64, bn=64, split=2, whole=3, stages=3, scaled=True, pdl=p) for p in PDL],
    *[
        Launch(
            bm=bm, bn=bn, split=2, whole=1, warps=w, stages=s, scaled=True, pdl=p, tma=True, overlap=True, spread=p == 2
        )
        for p in PDL
        for bm, bn, w, s in ((64, 64, 4, 3), (128, 64, 4, 2), (128, 256, 8, 3), (256, 128, 8, 3))
    ],
    *[Launch(bm=64, bn=64, split=s, whole=w, scaled=True, spread=True) for s, w in ((2, 0), (3, 2), (9, 0))],
    Launch("dequantize"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_launch_matches_the_exact_product(case: Case) -> None:
    x, weight, bias, exact = packed_cases.make(case, "cuda")
    got = w4a16_linear(x, weight, bias)
    assert packed_cases.error(got, exact) < packed_cases.TOLERANCE[case.dtype]
    assert torch.equal(got, w4a16_linear(x, weight, bias)), "two runs differ"


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda v: "-".join(str(x) for x in dataclasses.astuple(v)))
@pytest.mark.parametrize("m", [5, 70])
def test_every_kind_of_launch_writes_all_of_y(launch: Launch, m: int) -> None:
    x, weight, bias, exact = packed_cases.make(Case(328, 1536, m, bias=True), "cuda")
    out = torch.full((m, 400), float("nan"), dtype=torch.float16, device="cuda")
    run(x, weight, bias, out[:, :328], launch)
    assert packed_cases.error(out[:, :328], exact) < packed_cases.TOLERANCE[torch.float16]
    assert out[:, 328:].isnan().all(), "wrote past the row"


GATED = [
    *[Case(1152, 576, m, group=64, bias=True) for m in (1, 3, 16, 33, 100, 300)],
    *[Case(2 * 1368, 1032, 70, bits=b, group=g) for b in (4, 8) for g in (16, -1)],
    *[Case(2 * 264, 512, m, group=32, act_order=True) for m in (3, 1200)],
    *[Case(640, 768, m, dtype=d) for d in BF16 for m in (1, 16, 100)],
    *[Case(16, 8, 1, group=-1), Case(2 * 11008, 4096, 48), Case(2000, 1024, 5000)],
]


SHARE = 5e-3
"""Of the results of a quick activation, those that may be rounded to the other side: see `activate_quickly`."""


def ungated(both: torch.Tensor, name: str) -> torch.Tensor:
    """act(gate) * up of a product whose columns are paired."""
    gate, up = both.view(both.shape[0], -1, 2, 8).unbind(2)
    return act_and_mul((gate.flatten(1), up.flatten(1)), name)


@pytest.mark.parametrize("case", GATED, ids=str)
def test_a_gated_product_is_that_of_its_two_halves(case: Case) -> None:
    x, weight, bias, exact = packed_cases.make(case, "cuda")
    got = w4a16_gated(x, weight, bias, "silu")
    assert torch.equal(got, w4a16_gated(x, weight, bias, "silu")), "two runs differ"
    assert not wrong(got, ungated(w4a16_linear(x, weight, bias), "silu"), ulps=2.0, share=SHARE)
    gate, up = exact.view(case.m, -1, 2, 8).unbind(2)
    truth = torch.nn.functional.silu(gate.flatten(1)) * up.flatten(1)
    assert packed_cases.error(got, truth) < 2 * packed_cases.TOLERANCE[case.dtype]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda v: "-".join(str(x) for x in dataclasses.astuple(v)))
@pytest.mark.parametrize("m", [5, 70])
def test_every_kind_of_launch_can_be_gated(launch: Launch, m: int) -> None:
    x, weight, bias, _ = packed_cases.make(Case(336, 1536, m, bias=True), "cuda")
    out = torch.full((m, 200), float("nan"), dtype=torch.float16, device="cuda")
    both = torch.full((m, 336), float("nan"), dtype=torch.float16, device="cuda")
    run(x, weight, bias, out[:, :168], launch, "silu")
    run(x, weight, bias, both, launch)
    assert not wrong(out[:, :168], ungated(both, "silu"), ulps=2.0, share=SHARE)
    assert out[:, 168:].isnan().all(), "wrote past the row"


@pytest.mark.parametrize("name", sorted(set(KINDS)))
@pytest.mark.parametrize("m", [2, 64])
def test_every_activation_can_gate(name: str, m: int) -> None:
    x, weight, bias, _ = packed_cases.make(Case(256, 512, m, bias=True), "cuda")
    got, both = w4a16_gated(x, weight, bias, name), w4a16_linear(x, weight, bias)
    want = ungated(both, name)
    if KINDS[name] not in ("silu", "gelu_tanh", "quick_gelu", "sigmoid"):
        assert torch.equal(got, want)
        return
    if KINDS[name] == "gelu_tanh":
        # in float32 1 + tanh(u) loses what is small, which the quick form does not
        gate, up = both.view(m, -1, 2, 8).unbind(2)
        want = ACTIVATIONS[name](gate.flatten(1).double()).half() * up.flatten(1)
    amiss = wrong(got, want, ulps=2.0, share=SHARE)
    assert not amiss, amiss


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "quick_gelu", "sigmoid", "relu"])
def test_gating_takes_what_is_not_finite_as_torch_does(name: str) -> None:
    # one column of ones: the bias alone makes gate and up
    gate = torch.tensor([float("nan"), float("inf"), -float("inf"), 60000.0, -60000.0, -17.0, -1e-7, 0.0])
    weight = W4A16Weight.pack(
        torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(16, 1).half(), torch.zeros(16, 1, dtype=torch.int16), None,
        4, 128, "cuda",
    )  # fmt: skip
    bias = torch.cat((gate, torch.ones(8))).half().cuda()
    got = w4a16_gated(torch.zeros(3, 128, device="cuda", dtype=torch.float16), weight, bias, name)
    want = ungated(bias.expand(3, 16).contiguous(), name)
    assert torch.equal(got.isnan(), want.isnan())
    assert not wrong(got.nan_to_num(7.0), want.nan_to_num(7.0), share=1.0)


@pytest.mark.parametrize("case", [Case(72, 264, 1, bits=b, group=g) for b in (4, 8) for g in (16, 64, 128)], ids=str)
def test_dequantize_matches_the_reference(case: Case) -> None:
    _, weight, _, _ = packed_cases.make(case, "cuda")
    torch.testing.assert_close(dequantize(weight), dequantize_ref(weight, torch.float16), rtol=0, atol=0)


def test_reference_on_the_device_matches_the_exact_product() -> None:
    case = Case(64, 264, 3, group=32, act_order=True, bias=True)
    x, weight, bias, exact = packed_cases.make(case, "cuda")
    assert packed_cases.error(linear_ref(x, weight, bias), exact) < 6e-4


@pytest.mark.parametrize("m", [1, 64, 2048])
def test_a_captured_graph_gives_the_eager_bits(m: int) -> None:
    x, weight, bias, _ = packed_cases.make(Case(512, 1024, m, bias=True), "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        reserve("cuda")
        w4a16_linear(x, weight, bias)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = w4a16_linear(x, weight, bias)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, w4a16_linear(x, weight, bias))
        stream.synchronize()


@pytest.mark.skipif(TURING, reason="the point is the capability that is there")
def test_dtypes_that_a_card_lacks_are_refused() -> None:
    x, weight, _, _ = packed_cases.make(Case(64, 128, 3), "cuda")
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        w4a16_linear(x.float(), weight)

"""Decode attention on a GPU: natively, and through sm_75 code generation with TRITON_OVERRIDE_ARCH=sm75."""

import dataclasses

import decode_cases
import pytest
import torch
import triton
from decode_cases import TOLERANCE, Case

from qengine.kernels.paged_attn.decode import paged_decode, paged_decode_ref, run
from qengine.kernels.paged_attn.decode_launch import DecodeLaunch
from qengine.kernels.w4a16 import reserve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TURING = triton.knobs.runtime.override_arch == "sm75" or (
    torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 5)
)
BF16 = [] if TURING else [torch.bfloat16]
SHORT = (1, 15, 16, 17, 0, 63, 64, 65, 300, 129)
MIXED = (1, 40000, 3, 700, 0, 2049)

CASES = [
    *[Case(SHORT, head_dim=d) for d in (64, 80, 256)],
    *[Case(SHORT, head_dim=128, heads=h, kv_heads=k) for h, k in ((3, 3), (28, 4), (71, 1))],
    *[Case(SHORT, k, d, 14, 2) for k, d in (("int8", 64), ("int8", 80), ("int4", 32), ("int4", 112), ("int4", 256))],
    *[Case(SHORT, k, 128, 32, 2) for k in ("int8", "int4", "fp8")],
    *[Case(SHORT, k, 64, 6, 3, b) for k, b in (("float16", 8), ("float16", 1024), ("int8", 8), ("int4", 128))],
    *[Case((100, 900, 5), k, 128, 8, 2, 32, 30.0, 77) for k in ("float16", "int4")],
    *[Case(MIXED, k, 128, 8, 2, 32) for k in ("float16", "int8", "int4")],
    *[Case(lens, k, 128, 3, 3) for k in ("float16", "int8") for lens in (SHORT, MIXED)],
    *[Case(SHORT, "int4", d, h, k, offsets=2) for d, h, k in ((32, 14, 2), (80, 14, 2), (128, 28, 4), (256, 14, 2))],
    Case((100, 900, 5), "int4", 128, 8, 2, 32, 30.0, 77, offsets=2),
    Case(MIXED, "int4", 128, 40, 2, 32, offsets=2),
    *[Case(SHORT, k, 128, 8, 2, dtype=d) for d in BF16 for k in ("bfloat16", "int8")],
]
MORE = [
    *[Case(SHORT, head_dim=d) for d in (16, 32, 96, 112, 128, 192)],
    *[Case(SHORT, head_dim=128, heads=h, kv_heads=k) for h, k in ((1, 1), (7, 1), (9, 1))],
    *[Case(SHORT, k, d, 14, 2) for k in ("int8", "int4", "fp8") for d in (32, 64, 80, 96, 128, 112, 192, 256)],
    *[Case(SHORT, k, 64, 6, 3, b) for k in ("float16", "int8", "int4") for b in (8, 32, 64, 128, 1024)],
    *[Case((100, 900, 5), k, 128, 8, 2, 32, c, w) for k in ("float16", "int4") for c in (None, 30.0) for w in (1, 77)],
    *[Case(SHORT, "int4", d, h, 2, offsets=2) for d in (64, 96, 112, 192) for h in (2, 32)],
    *[Case(SHORT, "int4", 64, 6, 3, b, offsets=2) for b in (8, 32, 64, 128, 1024)],
    *[Case(SHORT, "int4", 128, 8, 2, dtype=d, offsets=2) for d in BF16],
    Case((131072, 5), "float16", 64, 2, 1, 64),
    Case((131072, 5), "int4", 64, 2, 1, 64, offsets=2),
    Case((9000, *[40] * 300), "int4", 64, 4, 4, 32, offsets=2),
    *[Case(SHORT, k, 128, 8, 2, dtype=d) for d in BF16 for k in ("int4", "fp8")],
    *[Case(SHORT, "bfloat16", d, 8, 2, dtype=t) for t in BF16 for d in (64, 256)],
]
LAUNCHES: list[tuple[str, DecodeLaunch]] = [
    ("float16", DecodeLaunch(1, 16, 0, 1, 1)),
    ("float16", DecodeLaunch(4, 32, 2, 2, 1, skip=True)),
    ("float16", DecodeLaunch(8, 16, 1, 1, 2)),
    ("int8", DecodeLaunch(2, 32, 3, 3, 1)),
    ("int4", DecodeLaunch(1, 16, 0, 1, 1)),
    ("int4", DecodeLaunch(4, 64, 3, 3, 3, skip=True)),
    *[(k, DecodeLaunch(w, 32, f, 4, skip=True, ahead=True)) for k, w, f in (("float16", 1, 2), ("int8", 2, 1))],
    *[("int4", DecodeLaunch(w, t, f, 4, skip=True, ahead=True)) for w, t, f in ((1, 64, 2), (2, 16, 0))],
]


def limit(case: Case) -> float:
    return TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_chosen_launch_matches_the_reference(case: Case) -> None:
    step = decode_cases.make(case, "cuda")
    out = torch.full(step.q.shape, float("nan"), dtype=case.dtype, device="cuda")
    paged_decode(step.q, step.cache, step.tables, step.lens, out, max_seq_len=max(case.lens), **case.options)
    assert decode_cases.error(out, step.exact) < limit(case)
    again = torch.full_like(out, float("nan"))
    for bound in (max(case.lens), 200000):
        paged_decode(step.q, step.cache, step.tables, step.lens, again, max_seq_len=bound, **case.options)
        assert decode_cases.error(again, step.exact) < limit(case)
        if bound == max(case.lens):
            assert torch.equal(out, again), "two runs differ"


@pytest.mark.parametrize(
    ("kind", "launch"), LAUNCHES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, dataclasses.astuple(v)))
)
def test_every_launch_writes_all_rows_and_no_others(kind: str, launch: DecodeLaunch) -> None:
    offsets = 2 if kind == "int4" else 1
    case = Case((1, 0, 500, 33, 2100), kind, 128, 14, 2, 16, offsets=offsets)  # type: ignore[arg-type]
    step = decode_cases.make(case, "cuda")
    wide = torch.full((len(case.lens), 15, 128), float("nan"), dtype=case.dtype, device="cuda")
    out = wide[:, :14]
    for splits in (None, 1, 5, 40, 131):
        out.fill_(float("nan"))
        run(
            step.q, step.cache, step.tables, step.lens, out, launch, max_seq_len=2100, num_splits=splits,
            **case.options,
        )  # fmt: skip
        assert decode_cases.error(out, step.exact) < limit(case)
        assert wide[:, 14:].isnan().all(), "wrote past the heads"


def test_many_rows() -> None:
    case = Case(tuple(torch.randint(0, 90, (2500,)).tolist()), head_dim=64, heads=2, kv_heads=1)
    step = decode_cases.make(case, "cuda")
    out = torch.full(step.q.shape, float("nan"), dtype=case.dtype, device="cuda")
    paged_decode(step.q, step.cache, step.tables, step.lens, out, max_seq_len=90, **case.options)
    assert decode_cases.error(out, step.exact) < limit(case)


def test_a_captured_step_follows_the_lengths() -> None:
    case = Case((3000, 1, 64, 900), "int8", 128, 8, 2)
    step = decode_cases.make(case, "cuda")
    out = torch.empty(step.q.shape, dtype=case.dtype, device="cuda")
    lens = step.lens.clone()

    def call() -> None:
        paged_decode(step.q, step.cache, step.tables, lens, out, max_seq_len=131072, **case.options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        reserve("cuda")
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        for change in ((3000, 1, 64, 900), (17, 1, 0, 0), (0, 0, 0, 0), (2999, 1, 33, 899)):
            lens.copy_(torch.tensor(change, dtype=torch.int32))
            out.fill_(float("nan"))
            graph.replay()
            exact = paged_decode_ref(step.q, step.cache, step.tables, lens, **case.options)
            assert decode_cases.error(out, exact) < limit(case)
        stream.synchronize()


def test_large_and_small_queries_lose_nothing_with_int4() -> None:
    # codes are subnormal numbers to the tensor cores, and so may their products be
    case = Case((700, 64, 3), "int4", 128, 14, 2, 32, offsets=2)
    for size in (2.0**-9, 2.0**9):
        step = decode_cases.make(case, "cuda")
        q = step.q * size
        exact = paged_decode_ref(q, step.cache, step.tables, step.lens, **case.options)
        out = torch.empty_like(q)
        paged_decode(q, step.cache, step.tables, step.lens, out, max_seq_len=700, **case.options)
        assert decode_cases.error(out, exact) < limit(case) * (1 if size < 1 else 8)


def test_the_accuracy_of_float16() -> None:
    case = Case((4096,) * 8, "float16", 128, 28, 4, 32)
    step = decode_cases.make(case, "cuda")
    out = torch.empty(step.q.shape, dtype=case.dtype, device="cuda")
    paged_decode(step.q, step.cache, step.tables, step.lens, out, max_seq_len=4096, **case.options)
    assert float((out.float() - step.exact).norm() / step.exact.norm()) < 3e-4


@pytest.mark.skipif(TURING, reason="the point is the capability that is there")
def test_dtypes_that_a_card_lacks_are_refused() -> None:
    step = decode_cases.make(Case((5,)), "cuda")
    q = step.q.float()
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        paged_decode(q, step.cache, step.tables, step.lens, torch.empty_like(q), scale=1.0, max_seq_len=5)

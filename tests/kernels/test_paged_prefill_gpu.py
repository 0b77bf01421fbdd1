"""Paged prefill attention on a GPU: natively, and through sm_75 code generation with TRITON_OVERRIDE_ARCH=sm75."""

import dataclasses

import prefill_cases
import pytest
import torch
import triton
from prefill_cases import TOLERANCE, Case

from qengine.kernels.paged_attn.prefill import paged_prefill, run_prefill
from qengine.kernels.paged_attn.prefill_launch import PrefillLaunch
from qengine.kernels.paged_attn.prefill_tiles import prefill_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SM = 0
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    SM = 75 if triton.knobs.runtime.override_arch == "sm75" else major * 10 + minor
TURING = SM == 75
BF16 = torch.bfloat16
RAGGED = ((130, 0), (1, 700), (7, 256), (300, 77), (64, 64))

CASES = [
    *[Case(head_dim=d, lens=RAGGED) for d in (64, 80, 96, 112, 128, 192, 256)],
    *[Case(head_dim=d, lens=((200, 150),), window=w) for d, w in ((64, 50), (128, 1), (128, 64), (256, 100))],
    *[Case(head_dim=d, lens=RAGGED, softcap=20.0, window=w) for d, w in ((128, 100), (256, None))],
    *[Case(head_dim=128, lens=RAGGED, block_size=b) for b in (8, 64, 256, 1024)],
    *[Case(heads=h, kv_heads=k, head_dim=128, lens=RAGGED) for h, k in ((28, 4), (8, 8), (48, 2))],
    *[Case(kind="int8", head_dim=d, lens=RAGGED) for d in (64, 80, 128, 256)],
    *[Case(kind="int4", head_dim=d, lens=RAGGED, offsets=o) for d in (64, 112, 128, 192) for o in (1, 2)],
    *[Case(kind="int4", head_dim=d, lens=RAGGED, offsets=2) for d in (80, 256)],
    Case(kind="int4", heads=28, kv_heads=4, head_dim=128, lens=RAGGED, window=90, softcap=20.0, offsets=2),
    *[Case(kind="int4", lens=((n, c),), head_dim=128, heads=8, offsets=2) for n, c in ((1, 300), (2, 0), (700, 500))],
    *[Case(kind=k, head_dim=128, lens=RAGGED, block_size=b, window=90) for k, b in (("int8", 8), ("int4", 256))],
    *[
        Case(lens=((n, c),), head_dim=128, heads=8)
        for n, c in ((1, 0), (2, 0), (1, 5000), (17, 3), (2048, 0), (64, 2000))
    ],
    Case(lens=tuple((i % 37 + 1, i * 7 % 90) for i in range(70)), head_dim=64),
    Case(head_dim=128, lens=RAGGED, spread=6.0),
]
if not TURING:
    CASES += [Case(kind="bfloat16", dtype=BF16, head_dim=d, lens=RAGGED) for d in (80, 128)]
    CASES += [Case(kind=k, dtype=BF16, head_dim=128, lens=RAGGED) for k in ("int8", "int4")]
    CASES += [Case(kind="int4", dtype=BF16, head_dim=128, lens=RAGGED, offsets=2)]
if SM >= 89:
    CASES += [Case(kind="fp8", head_dim=d, lens=RAGGED) for d in (64, 192)]
    CASES += [Case(kind="fp8", dtype=BF16, head_dim=128, lens=RAGGED)]


def call(step: prefill_cases.Step, case: Case) -> None:
    paged_prefill(
        step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out,
        max_query_len=max(n for n, _ in case.lens), **step.options,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_launch_matches_float32(case: Case) -> None:
    step = prefill_cases.make(case, "cuda")
    call(step, case)
    # sharp scores (a spread of 6) are as far from float32 as their fp16 inputs' products are exact: the same bound
    assert prefill_cases.error(step, case) < TOLERANCE[(case.kind, case.dtype)]
    first = step.out.clone()
    step.wide_out.fill_(float("nan"))
    call(step, case)
    assert torch.equal(first.nan_to_num(7.0), step.out.nan_to_num(7.0)), "two runs differ"


LAUNCHES = [
    *[PrefillLaunch(bm=bm, bn=bn, warps=w, pack=p) for bm, bn, w, p in ((16, 16, 1, 1), (32, 64, 2, 3))],
    *[PrefillLaunch(bm=64, bn=32, warps=4, pack=6, split=s, prefetch=not s) for s in (False, True)],
    *[PrefillLaunch(bm=64, bn=16, warps=4, pack=6, sums=True, prefetch=p) for p in (False, True)],
    *[PrefillLaunch(bm=128, bn=64, warps=8, pack=2, stages=s) for s in ([] if TURING else [2, 3])],
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda v: "-".join(str(x) for x in dataclasses.astuple(v)))
@pytest.mark.parametrize("kind", ["float16", "int4"])
def test_every_kind_of_launch_matches_float32(launch: PrefillLaunch, kind: str) -> None:
    case = Case(heads=12, kind=kind, lens=RAGGED, window=70 if kind == "int4" else None, offsets=1 + (kind == "int4"))
    step = prefill_cases.make(case, "cuda")
    run_prefill(
        step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out, launch,
        max_query_len=max(n for n, _ in case.lens), **step.options,
    )  # fmt: skip
    assert prefill_cases.error(step, case) < TOLERANCE[(case.kind, case.dtype)]


WIDE = [
    *[(size, kind, 64, 16, p) for size in (192, 256) for kind in ("float16", "int8", "int4") for p in (False, True)],
    *[(192, "float16", 64, 32, False), (192, "float16", 128, 16, True)],
]


@pytest.mark.parametrize(("size", "kind", "bm", "bn", "prefetch"), WIDE)
def test_wide_heads_with_sums_by_a_product_match_float32(
    size: int, kind: str, bm: int, bn: int, prefetch: bool
) -> None:
    case = Case(heads=12, head_dim=size, kind=kind, lens=RAGGED, offsets=1 + (kind == "int4"))
    step = prefill_cases.make(case, "cuda")
    run_prefill(
        step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out,
        PrefillLaunch(bm=bm, bn=bn, warps=bm // 16, pack=6, sums=True, prefetch=prefetch),
        max_query_len=max(n for n, _ in case.lens), **step.options,
    )  # fmt: skip
    assert prefill_cases.error(step, case) < TOLERANCE[(case.kind, case.dtype)]


HOPPER = [
    (PrefillLaunch(bn=128, stages=2, pack=1, hopper=True, split=False), 128, None, 16),
    (PrefillLaunch(bn=128, stages=2, pack=7, hopper=True), 64, None, 256),
    (PrefillLaunch(bn=64, stages=4, pack=7, hopper=True), 128, 333, 8),
    (PrefillLaunch(bn=64, stages=2, pack=7, hopper=True), 256, 100, 64),
    (PrefillLaunch(bn=64, stages=2, pack=7, hopper=True), 80, None, 64),
]


@pytest.mark.skipif(SM != 90, reason="the kernel of compute capability 9.0")
@pytest.mark.parametrize(("launch", "size", "window", "block"), HOPPER, ids=str)
def test_hopper_launches_match_float32(launch: PrefillLaunch, size: int, window: int | None, block: int) -> None:
    case = Case(heads=14, head_dim=size, lens=RAGGED, window=window, block_size=block, softcap=30.0 if window else None)
    step = prefill_cases.make(case, "cuda")
    for _ in range(3):
        step.wide_out.fill_(float("nan"))
        run_prefill(
            step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out, launch,
            max_query_len=max(n for n, _ in case.lens), **step.options,
        )  # fmt: skip
        assert prefill_cases.error(step, case) < TOLERANCE[(case.kind, case.dtype)]


def test_tiles_come_in_order_and_none_is_missing() -> None:
    lens = [(int(n), int(c)) for n, c in torch.randint(0, 300, (150, 2)).tolist()]
    starts = torch.tensor([5, *(5 + sum(n for n, _ in lens[: i + 1]) for i in range(150))], dtype=torch.int32)
    lengths = torch.tensor([n + c for n, c in lens], dtype=torch.int32)
    got = prefill_tiles(starts.cuda(), lengths.cuda(), int(starts[-1]), 18).tolist()
    want = {(p, t): c + min(n, 18 * (t + 1)) for p, (n, c) in enumerate(lens) for t in range(-(-n // 18))}
    tiles = [tuple(x[:2]) for x in got[: len(want)]]
    assert all(x[2:5] == [int(starts[x[0]]), *lens[x[0]]] for x in got[: len(want)])
    assert sorted(tiles) == sorted(want)
    ends = [want[t] for t in tiles]
    assert ends == sorted(ends, reverse=True)
    assert all(x[0] == -1 for x in got[len(want) :])


def test_a_captured_graph_serves_new_lengths() -> None:
    case = Case(heads=14, kv_heads=2, head_dim=128, lens=((60, 40), (33, 67), (90, 10)))
    other = dataclasses.replace(case, lens=((20, 80), (88, 12), (75, 25)))
    step, new = prefill_cases.make(case, "cuda"), prefill_cases.make(other, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(step, case)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call(step, case)
        for name in ("k", "v"):
            getattr(step.cache, name).copy_(getattr(new.cache, name))
        for name in ("block_tables", "seq_lens", "query_starts", "q"):
            getattr(step, name).copy_(getattr(new, name))
        step.wide_out.fill_(float("nan"))
        graph.replay()
        stream.synchronize()
    assert prefill_cases.error(step, other) < TOLERANCE[(case.kind, case.dtype)]


def test_padding_rows_read_nothing_and_are_zero() -> None:
    case = Case(head_dim=128, lens=((40, 20), (12, 0)))
    step = prefill_cases.make(case, "cuda")
    step.seq_lens[1] = 0
    step.block_tables[1] = 2**30
    call(step, case)
    rows = slice(case.before + 40, case.before + 52)
    assert bool((step.out[rows] == 0).all())
    assert not step.out[case.before : case.before + 40].isnan().any()


def test_the_operator_passes_torch_s_own_checks() -> None:
    case = Case(head_dim=64)
    step = prefill_cases.make(case, "cuda")
    args = (
        step.q, step.cache.k, step.cache.v, None, None, step.block_tables, step.seq_lens, step.query_starts,
        step.out.contiguous(), "float16", 20, 0.125, None, None,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.qengine.paged_prefill.default, args, test_utils=("test_schema", "test_faketensor")
    )  # fmt: skip

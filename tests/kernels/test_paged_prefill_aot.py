"""The prefill kernels compiled for cards that are not here: within Turing's limits, on its tensor cores."""

import itertools

import pytest

from qengine.kernels import turing
from qengine.kernels.paged_attn.aot_prefill import compile_hopper, inspect_prefill
from qengine.kernels.paged_attn.prefill_launch import PrefillLaunch, pick_prefill

TWO = "int4, two key offsets"
SIZES = (64, 80, 96, 112, 128, 192, 256)
FEW = [
    *[(size, "float16", size in (64, 256)) for size in SIZES],
    *[(size, kind, False) for size, kind in ((128, "int8"), (128, "int4"), (256, "int8"), (80, "int4"))],
    *[(size, TWO, options) for size, options in ((64, True), (128, False), (256, False))],
]
ALL = list(itertools.product(SIZES, ("float16", "int8", "int4", TWO), (False, True)))


def check_turing(size: int, kind: str, options: bool, query_len: int = 2048) -> None:
    name, offsets = kind.split(",")[0], 2 if kind == TWO else 1
    launch = pick_prefill(75, size, name, 7, query_len)
    code, shared = inspect_prefill(
        launch, 75, size, kind="float" if name == "float16" else name, key_offsets=offsets, softcap=options,
        sliding=options,
    )  # fmt: skip
    assert code.stack == 0, f"{code.stack} bytes of stack"
    assert shared <= 65536
    for loop in code.loops:
        keys, ops = launch.bn, launch.bm * launch.bn * 2 * max(size, 16) / (16 * 8 * 8) / launch.warps
        # the loops over keys, not those over padding: both products are on the tensor cores
        if loop.of("HMMA"):
            assert loop.of("HMMA.1688.F32") >= 0.95 * ops * (0.5 if launch.warps > launch.bm // 16 else 1), keys
            assert loop.of("FFMA") < loop.total / 2
    assert sum(1 for loop in code.loops if loop.of("HMMA")) >= (3 if options else 2)


@pytest.mark.parametrize(("size", "kind", "options"), FEW)
def test_turing_code_keeps_to_the_card(size: int, kind: str, options: bool) -> None:
    check_turing(size, kind, options)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind", "options"), ALL)
@pytest.mark.parametrize("query_len", [2, 8, 2048])
def test_all_turing_code_keeps_to_the_card(size: int, kind: str, options: bool, query_len: int) -> None:
    check_turing(size, kind, options, query_len)


@pytest.mark.parametrize(
    ("size", "launch"),
    [
        (256, PrefillLaunch(bm=64, bn=16, pack=4, warps=4, sums=True)),
        (256, PrefillLaunch(bm=64, bn=16, pack=4, warps=4, sums=True, prefetch=True)),
        (192, PrefillLaunch(bm=128, bn=32, pack=4, warps=8)),
        (192, PrefillLaunch(bm=64, bn=32, pack=4, warps=4)),
    ],
    ids=lambda v: f"{v.bm}x{v.bn}{'-prefetch' * v.prefetch}" if isinstance(v, PrefillLaunch) else str(v),
)
def test_wide_heads_give_each_turing_warp_rows_of_its_own(size: int, launch: PrefillLaunch) -> None:
    code, shared = inspect_prefill(launch, 75, size, group=4)
    assert code.stack == 0
    assert shared <= 65536
    products = launch.bm * launch.bn * 2 * size / (16 * 8 * 8) / launch.warps
    loop = code.main_loop()
    # neither product is done twice, and what leaves them stays in registers: only q, keys and values are read back
    assert products <= loop.of("HMMA.1688.F32") <= 1.05 * products
    assert loop.of("LDSM") * 512 * launch.warps == 2 * size * launch.warps * (2 * launch.bn + 16)
    assert loop.of("BAR") <= (6 if launch.prefetch else 4)


def test_turing_refuses_copies_in_flight() -> None:
    with pytest.raises(turing.TuringError, match="num_stages=2"):
        inspect_prefill(PrefillLaunch(bm=32, bn=32, warps=4, stages=2), 75, 64)


@pytest.mark.parametrize(("size", "kind"), [(128, "float16"), (192, "float16"), (128, "int8")])
def test_ampere_code_has_no_stack_and_copies_asynchronously(size: int, kind: str) -> None:
    launch = pick_prefill(80, size, kind, 7, 2048)
    code, shared = inspect_prefill(launch, 80, size, kind="float" if kind == "float16" else kind)
    assert code.stack == 0
    assert shared <= 101376, "also cards of compute capability 8.6 take it"
    assert code.main_loop().of("HMMA.16816.F32") > 0
    assert launch.stages == 1 or code.main_loop().of("LDGSTS") > 0


@pytest.mark.parametrize(("size", "options"), [(128, False), pytest.param(256, True, marks=pytest.mark.slow)])
def test_hopper_roles_use_wgmma_and_the_copy_engine(size: int, options: bool) -> None:
    launch = pick_prefill(90, size, "float16", 7, 2048)
    assert launch.hopper
    kernel = compile_hopper(launch, size, softcap=options, sliding=options)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 232448

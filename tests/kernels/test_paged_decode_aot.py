"""The decode kernel compiled ahead of time: what Turing, Ampere and Hopper would run, without a card."""

import dataclasses

import pytest

from qengine.kernels.paged_attn.aot_decode import Compiled, inspect_decode
from qengine.kernels.paged_attn.decode_launch import DecodeLaunch, DecodeShape, pick_decode

QUICK = [
    (75, DecodeShape("float16", 128, 4, 16)),
    (75, DecodeShape("int4", 256, 7, 32)),
    (75, DecodeShape("int4", 128, 7, 16, 2)),
    (90, DecodeShape("int4", 128, 7, 16, 2)),
]
ALL = [
    *[(75, DecodeShape(k, d, g, 16)) for k in ("float16", "int8", "int4") for d in (64, 80, 96, 112, 128, 192, 256)
      for g in (1, 16)],
    *[(75, DecodeShape("int4", d, g, 16, 2)) for d in (64, 80, 96, 112, 128, 192, 256) for g in (1, 7, 16)],
    *[(sm, DecodeShape("int4", 128, g, 32, 2)) for sm in (80, 90) for g in (1, 7, 16)],
    *[(75, DecodeShape("float16", 128, g, b)) for g, b in ((7, 8), (5, 1024), (32, 32))],
    *[(sm, DecodeShape(k, 128, g, 32)) for sm in (80, 90) for k in ("float16", "bfloat16", "int8", "int4", "fp8")
      for g in (1, 7)],
]  # fmt: skip
BUDGET = {"float16": 2.7, "bfloat16": 2.7, "int8": 3.6, "fp8": 4.2, "int4": 3.1}
"""Instructions for each cached element at head_dim 128 and up to 8 queries. A T4 that reads 300 GB/s of int4 codes
takes in 600 G elements/s and issues 5 T lane instructions/s: 8 for each."""


def check(sm: int, shape: DecodeShape, found: Compiled) -> None:
    if sm == 75:
        assert found.code.stack == 0, f"{found.code.stack} bytes of stack"
    assert found.shared <= 65536
    loop = found.loop
    # both products are there: the first has 16 rows of queries, the second 8 for every 8 queries
    first = launch_tokens(sm, shape) // 8 * shape.padded // 16
    second = shape.padded // 16 * launch_tokens(sm, shape) // 16 * shape.row_groups
    if shape.kind == "int4":
        second += launch_tokens(sm, shape) // 16 * shape.row_groups  # sums of the probabilities
    assert loop.of("HMMA") == (first + second) * (2 if sm == 75 else 1)
    assert loop.of("HMMA.1688" if sm == 75 else "HMMA.16816") == loop.of("HMMA")
    assert loop.of("FFMA", "FMUL") < 4 * found.elements, "products outside the tensor cores"
    assert (loop.of("CCTL") > 0) == pick_decode(shape, 8, 4096, sm).ahead, "tiles are brought to L2 as launches say"
    assert loop.of("BAR", "STS", "ATOM") == 0, "warps wait for each other in the loop"
    # from Ampere on launches use all registers there are: whether one of them is spilled depends on the assembler
    assert loop.of("LDL", "STL") <= (0 if sm == 75 else 2), "spills in the loop"
    if shape.head_dim in (64, 128, 256) and shape.kind in ("float16", "bfloat16", "int8"):
        wide = shape.padded * launch_tokens(sm, shape) * 2 // shape.elements_a_word * 4 // 32 // 16
        if (shape.kind, shape.head_dim) != ("int8", 64):
            assert loop.of("LDG.E.128") == wide, "keys and values are not loaded 16 bytes at a time"
    if shape.head_dim >= 128 and shape.group <= 8:
        assert found.instructions < BUDGET[shape.kind], f"{found.instructions:.2f} instructions an element"


def launch_tokens(sm: int, shape: DecodeShape) -> int:
    return pick_decode(shape, 8, 4096, sm).tokens


@pytest.mark.parametrize(("sm", "shape"), QUICK, ids=lambda v: str(v) if isinstance(v, int) else shape_id(v))
def test_machine_code(sm: int, shape: DecodeShape) -> None:
    check(sm, shape, inspect_decode(shape, pick_decode(shape, 8, 4096, sm), sm))


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "shape"), ALL, ids=lambda v: str(v) if isinstance(v, int) else shape_id(v))
def test_machine_code_of_every_kind_and_head_dim(sm: int, shape: DecodeShape) -> None:
    check(sm, shape, inspect_decode(shape, pick_decode(shape, 8, 4096, sm), sm))


def shape_id(shape: DecodeShape) -> str:
    return "-".join(map(str, dataclasses.astuple(shape)))


def test_the_check_sees_a_spill() -> None:
    shape = DecodeShape("float16", 128, 4, 16)
    launch = dataclasses.replace(pick_decode(shape, 8, 4096, 75), registers=96)
    with pytest.raises(AssertionError, match="bytes of stack"):
        check(75, shape, inspect_decode(shape, launch, 75))


def test_launches_are_ones_that_a_capability_has() -> None:
    for sm in (75, 80, 86, 89, 90):
        for kind in ("float16", "int8", "int4", "fp8"):
            for head_dim in (64, 80, 128, 192, 256):
                launch = pick_decode(DecodeShape(kind, head_dim, 4, 16), 1, 100, sm)
                assert isinstance(launch, DecodeLaunch)
                assert launch.tokens >= 16
                assert launch.tokens & (launch.tokens - 1) == 0

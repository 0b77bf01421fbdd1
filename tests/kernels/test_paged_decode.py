"""What of decode attention runs without a card: the reference, the checks of arguments, and the sizes of launches."""

import decode_cases
import pytest
import torch
from decode_cases import Case

from qengine.kernels.paged_attn.cache import gather_kv
from qengine.kernels.paged_attn.decode import paged_decode, paged_decode_ref
from qengine.kernels.paged_attn.decode_launch import DecodeLaunch, DecodeShape, part_floats, pick_decode, programs

KINDS = ("float16", "bfloat16", "int8", "int4", "fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_tensor_is_served_by_the_reference(kind: str) -> None:
    case = Case((5, 0, 40), kind, 32, softcap=20.0, window=9)  # type: ignore[arg-type]
    step = decode_cases.make(case)
    out = torch.full(step.q.shape, float("nan"), dtype=case.dtype)
    paged_decode(step.q, step.cache, step.tables, step.lens, out, max_seq_len=40, **case.options)
    assert torch.equal(out, step.exact.to(case.dtype))
    assert not out[1].any(), "a sequence of length 0 gives zeros"


def test_the_reference_is_softmax_over_the_window() -> None:
    case = Case((50,), head_dim=16, heads=4, kv_heads=2, softcap=3.0, window=7)
    step = decode_cases.make(case)
    k, v = gather_kv(step.cache, step.tables[0], 50)
    for head in range(4):
        scores = (k[43:, head // 2] @ step.q[0, head].float()) * 0.25
        weights = torch.softmax(torch.tanh(scores / 3.0) * 3.0, 0)
        torch.testing.assert_close(step.exact[0, head], weights @ v[43:, head // 2])


def test_an_empty_step_is_nothing() -> None:
    step = decode_cases.make(Case((5,)))
    q, tables, lens = step.q[:0], step.tables[:0], step.lens[:0]
    paged_decode(q, step.cache, tables, lens, torch.empty_like(q), scale=1.0, max_seq_len=1)
    assert paged_decode_ref(q, step.cache, tables, lens, scale=1.0).shape == q.shape


def test_arguments_that_do_not_fit_are_refused() -> None:
    step = decode_cases.make(Case((5, 6)))
    good = {"q": step.q, "block_tables": step.tables, "seq_lens": step.lens, "out": torch.empty_like(step.q)}
    options = {"scale": 1.0, "max_seq_len": 6}
    for change, reason in (
        ({"q": step.q[:, :3]}, "q must be"),
        ({"q": step.q[..., :64]}, "q must be"),
        ({"out": good["out"].float()}, "out must be"),
        ({"block_tables": step.tables[:1]}, "block_tables must be"),
        ({"block_tables": step.tables.long()}, "must be int32"),
        ({"seq_lens": step.lens.long()}, "must be int32"),
        ({"q": step.q.transpose(0, 1).contiguous().transpose(0, 1)}, "one after the other"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"num_splits": 0}, "num_splits=0"),
    ):
        with pytest.raises(ValueError, match=reason):
            paged_decode(cache=step.cache, **{**good, **options, **change})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 7, 8, 9, 71])
def test_shapes_cover_a_head_and_its_queries(kind: str, head_dim: int, group: int) -> None:
    shape = DecodeShape(kind, head_dim, group, 16)
    constants = shape.constants(pick_decode(shape, 1, 1000, 90), 2)
    words = head_dim // shape.elements_a_word
    assert words % constants["VK"] == 0
    assert words % constants["VV"] == 0
    assert shape.padded >= head_dim
    assert shape.passes * shape.rows >= group
    padded = shape.padded // shape.elements_a_word
    assert padded % (4 * constants["VK"]) == 0
    assert padded % (8 * constants["VV"]) == 0
    assert kind == "int4" or padded // (4 * constants["VK"]) >= 2, "keys are read in two halves"


@pytest.mark.parametrize("rows", [1, 3, 32, 256])
@pytest.mark.parametrize("longest", [1, 100, 8192, 131072])
@pytest.mark.parametrize("kv_heads", [1, 4, 32])
def test_programs_fill_the_card_and_no_more(rows: int, longest: int, kv_heads: int) -> None:
    shape = DecodeShape("float16", 128, 7, 16)
    launch = pick_decode(shape, rows, longest, 90)
    full = 132 * launch.per_sm * launch.rounds
    tiles = rows * kv_heads * -(-longest // launch.tile)
    count = programs(launch, shape, kv_heads, rows, longest, 132, 60000)
    assert 1 <= count <= full
    assert count == full or count >= tiles // launch.min_tiles, "a card that could be full is"
    assert count <= max(tiles, 1), "each program can have a tile"
    assert programs(launch, shape, kv_heads, rows, longest, 132, 5) == min(count, 5), "the workspace has room for five"


@pytest.mark.parametrize(("group", "live"), [(1, 1), (2, 2), (3, 4), (7, 8), (9, 16), (71, 16)])
def test_parts_have_the_rows_that_are_queries(group: int, live: int) -> None:
    shape = DecodeShape("float16", 128, group, 16)
    assert shape.live == live
    assert part_floats(shape) == 2 * live * (128 + 2), "a program leaves two parts, each with two numbers a row"


def test_splits_can_be_given() -> None:
    shape = DecodeShape("int8", 128, 1, 16)
    assert programs(DecodeLaunch(), shape, 8, 2, 8192, 132, 10**6, num_splits=5) == 80

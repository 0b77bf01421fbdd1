"""Paged prefill on the CPU: the reference behind the operator, what is refused, and the choice of launches."""

import prefill_cases
import pytest
import torch
from prefill_cases import Case

from qengine.kernels.paged_attn.cache import BlockLayout, KVPool, gather_kv
from qengine.kernels.paged_attn.prefill import paged_prefill
from qengine.kernels.paged_attn.prefill_launch import PrefillLaunch, head_chunk, packing, parts, pick_prefill
from qengine.kernels.paged_attn.prefill_tiles import tile_count


def call(step: prefill_cases.Step, longest: int = 64, **changes: object) -> None:
    fields = {
        "q": step.q, "cache": step.cache, "block_tables": step.block_tables, "seq_lens": step.seq_lens,
        "query_starts": step.query_starts, "out": step.out, "max_query_len": longest, **step.options, **changes,
    }  # fmt: skip
    paged_prefill(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8", "int4", "fp8"])
def test_reference_attends_key_by_key(kind: str) -> None:
    case = Case(kind=kind, heads=4, kv_heads=2, head_dim=16, lens=((3, 4), (0, 2), (1, 0)), window=3, softcap=4.0)
    step = prefill_cases.make(case)
    call(step)
    row = case.before
    for sequence, (new, context) in enumerate(case.lens):
        k, v = gather_kv(step.cache, step.block_tables[sequence], new + context)
        for i, head in ((i, h) for i in range(new) for h in range(4)):
            at = context + i
            seen = range(max(0, at - 2), at + 1)
            scores = (
                torch.stack([step.q[row + i, head].float() @ k[j, head // 2] for j in seen]) * step.options["scale"]
            )
            weights = torch.softmax(4.0 * torch.tanh(scores / 4.0), 0)
            want = sum(w * v[j, head // 2] for w, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(step.out[row + i, head].float(), want, rtol=2e-3, atol=2e-3)
        row += new
    assert step.wide_out[: case.before].isnan().all()
    assert step.wide_out[:, 4:].isnan().all()


def test_no_tokens_and_no_sequences_write_nothing() -> None:
    step = prefill_cases.make(Case())
    call(step, longest=0)
    call(
        step, block_tables=step.block_tables[:0], seq_lens=step.seq_lens[:0], query_starts=step.query_starts[:1]
    )  # fmt: skip
    assert step.wide_out.isnan().all()


def test_the_operator_is_traced_without_being_run() -> None:
    step = prefill_cases.make(Case())
    args = (
        step.q, step.cache.k, step.cache.v, None, None, step.block_tables, step.seq_lens, step.query_starts,
        step.out.contiguous(), "float16", 20, 0.125, None, None,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.qengine.paged_prefill.default, args, test_utils=("test_schema", "test_faketensor")
    )  # fmt: skip


def test_what_does_not_fit_is_refused_with_what_was_got() -> None:
    step = prefill_cases.make(Case(heads=4, kv_heads=2, head_dim=64))
    strange = torch.zeros(step.q.shape[0], 4, 68, dtype=torch.float16)[:, :, :64]
    refused = {
        r"a multiple of 2 heads, 64\], got \[30, 3, 64\]": {"q": step.q[:, :3]},
        r"out must be torch.float16": {"out": step.out.float()},
        r"q must have contiguous heads": {"q": strange},
        r"seq_lens must be contiguous int32": {"seq_lens": step.seq_lens.long()},
        r"do not fit: \[1\], \[3\], \[2, 2\]": {"seq_lens": step.seq_lens[:1]},
        r"scale=0": {"scale": 0.0},
        r"softcap=-1": {"softcap": -1.0},
        r"sliding_window=0": {"sliding_window": 0},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=f"paged prefill: .*{message}"):
            call(step, **changes)


@pytest.mark.parametrize(
    ("head_dim", "kind", "want"),
    [
        (64, "float", (64, 0)), (80, "int8", (64, 16)), (96, "float", (64, 32)), (112, "float", (128, 0)),
        (128, "fp8", (128, 0)), (192, "float", (128, 64)), (256, "float", (256, 0)), (72, "float", (64, 16)),
        (8, "float", (16, 0)), (24, "float", (32, 0)), (40, "float", (32, 16)), (80, "int4", (64, 64)),
        (128, "int4", (64, 64)), (16, "int4", (16, 16)),
    ],
)  # fmt: skip
def test_heads_are_cut_in_powers_of_two(head_dim: int, kind: str, want: tuple[int, int]) -> None:
    assert parts(head_dim, kind) == want
    assert parts(head_dim, "float", True)[1] == 0


def test_rows_of_a_tile_are_shared_by_a_group_where_that_wastes_few() -> None:
    assert packing(1, 128, 2048) == 1
    assert packing(7, 128, 2048) == 7
    assert packing(7, 64, 2048) == 7
    assert packing(7, 32, 2048) == 1
    assert packing(12, 128, 2048) == 6
    assert packing(71, 128, 2048) == 1
    assert packing(4, 16, 4) == 4
    for group in range(1, 100):
        for bm in (16, 32, 64, 128):
            assert group % packing(group, bm, 2048) == 0
            assert packing(group, bm, 1) <= bm


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_launches_are_pure_and_hold_a_whole_number_of_tokens(sm: int) -> None:
    for size in (64, 80, 96, 112, 128, 192, 256):
        for kind in ("float16", "int8", "int4"):
            for group in (1, 3, 7, 16):
                for longest in (1, 2, 5, 16, 33, 4096):
                    launch = pick_prefill(sm, size, kind, group, longest)
                    assert launch == pick_prefill(sm, size, kind, group, longest)
                    assert launch.rows >= 1
                    assert group % launch.pack == 0
                    assert sm >= 80 or launch.stages == 1
                    assert not launch.hopper or (sm == 90 and kind == "float16" and launch.bm == 128)


def test_heads_are_taken_in_whole_chunks_that_fill_the_card() -> None:
    assert head_chunk(32, 68, 132) == 4
    assert head_chunk(28, 17, 132) == 28
    assert head_chunk(7, 1000, 132) == 1
    assert head_chunk(5, 1, 132) == 5
    for groups in range(1, 70):
        assert groups % head_chunk(groups, 9, 40) == 0


def test_hopper_tiles_hold_one_head_unless_chunks_are_short() -> None:
    assert pick_prefill(90, 128, "float16", 7, 2048).pack == 1
    assert pick_prefill(90, 128, "float16", 7, 18).pack == 7
    assert pick_prefill(90, 128, "float16", 8, 16).pack == 8


def test_tiles_are_counted_from_what_the_host_knows() -> None:
    assert tile_count(100, 1, 18, 100) == 6
    assert tile_count(100, 3, 18, 50) == 8
    assert tile_count(64, 64, 128, 1) == 64
    assert PrefillLaunch(bm=128, pack=7).rows == 18


def test_blocks_of_16_bit_caches_are_whole_rows() -> None:
    # the copy engine reads such a cache as one table of rows, keys and values of all blocks
    for size in (64, 80, 96, 112, 128, 192, 256):
        for block in (8, 16, 1024):
            cache = KVPool.allocate(BlockLayout("float16", 3, size, block), 2, 2, "cpu").layer(1)
            assert cache.k.stride(0) % size == 0
            assert (cache.v.data_ptr() - cache.k.data_ptr()) % (2 * size) == 0

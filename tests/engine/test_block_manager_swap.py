"""The block manager with a CPU tier: evicted blocks, swapped sequences, what is wanted, what a failed step loses."""

import math

import pytest

from qengine.engine.block_manager import BlockManager, block_hash, root_hash
from qengine.engine.cpu_tier import CpuTier
from qengine.engine.swap_policy import SwapPolicy


def manager(num_blocks, num_cpu_blocks, *, size=2, caching=True, threshold=0.0, late=math.inf, prefill=1000.0):
    """Each copy of a block takes 1 ms, so does computing a token at the default rate."""
    policy = SwapPolicy(1000, size, 1e6, 1e6, prefill, threshold, late)
    return BlockManager(num_blocks, size, enable_prefix_caching=caching, num_cpu_blocks=num_cpu_blocks, policy=policy)


def run(blocks, seq, tokens):
    """Admit and compute a whole prompt."""
    cached = blocks.begin(seq, tokens)
    blocks.commit(seq, tokens, len(tokens))
    return cached


def check(blocks):
    blocks.check_integrity()
    orders = blocks.take_orders()
    blocks.check_integrity()
    return orders


def test_evicted_blocks_go_to_cpu_memory_and_hits_come_back():
    blocks = manager(4, 8)
    run(blocks, 1, [1, 2, 3, 4, 5])
    blocks.free(1)
    run(blocks, 2, [6, 7, 8, 9, 6, 7])  # takes the unnamed block, then the two of [1 2 3 4]
    orders = check(blocks)
    assert len(orders.out) == 1  # the end of the prompt first: [3 4]
    blocks.free(2)
    run(blocks, 3, [0] * 7)
    orders = check(blocks)
    blocks.free(3)
    assert blocks.tier.stats.blocks_out == blocks.stats.evicted_blocks > 2
    cached = run(blocks, 4, [1, 2, 3, 4, 9])
    orders = check(blocks)
    assert cached == 4
    assert len(orders.in_) == 2
    assert [target for _, target in orders.in_] == blocks.table(4)[:2]
    assert blocks.stats.cpu_hit_tokens == 4
    assert blocks.stats.hit_rate == 4 / (5 + 6 + 7 + 5)


def test_content_that_came_back_is_not_copied_out_again():
    blocks = manager(2, 4)
    run(blocks, 1, [1, 2, 3])
    blocks.free(1)
    run(blocks, 2, [4, 5, 6])
    blocks.free(2)
    run(blocks, 1, [1, 2, 3])
    blocks.free(1)
    first = blocks.tier.stats.blocks_out
    check(blocks)
    outs = 0
    for _ in range(3):
        for tokens in ([4, 5, 6], [1, 2, 3]):
            assert run(blocks, 9, tokens) == 2
            blocks.free(9)
            outs += len(check(blocks).out)
    assert first == outs == 0


def test_least_recently_used_cpu_block_is_dropped():
    blocks = manager(2, 2)
    for i in range(4):  # the last one stays on the device
        run(blocks, i, [10 * i, 10 * i + 1, 0])
        blocks.free(i)
        check(blocks)
    assert blocks.tier.stats.dropped_blocks == 1
    assert blocks.begin(9, [10, 11, 0]) == 2
    blocks.free(9)
    assert blocks.begin(9, [0, 1, 0]) == 0


def test_content_that_is_saved_again_counts_as_used():
    tier = CpuTier(2, keeps_cached=True)
    for block, name in enumerate((b"a", b"b", b"a", b"c")):
        tier.save(block, name)
    assert tier.find(b"a") is not None
    assert tier.find(b"c") is not None
    assert tier.find(b"b") is None
    assert sorted(tier.take_orders().out) == [(0, 0), (3, 1)], "what is there is not copied, what was dropped neither"


def test_without_room_or_where_copies_do_not_pay_nothing_is_copied():
    for blocks in (manager(2, 0), manager(2, 9, threshold=1.1), manager(2, 9, threshold=math.inf)):
        for i in range(4):
            run(blocks, i, [10 * i, 10 * i + 1, 0])
            blocks.free(i)
            assert not check(blocks)
        assert not blocks.preempt(7, [1, 2, 3], 2) if run(blocks, 7, [1, 2, 3]) else True


def test_swapped_sequence_comes_back_whole_with_prefix_caching_off_too():
    for caching in (True, False):
        blocks = manager(5, 8, caching=caching)
        tokens = [1, 2, 3, 4, 5, 6, 7, 8]
        run(blocks, 1, tokens[:7])
        table = list(blocks.table(1))
        assert blocks.preempt(1, tokens, 7)
        assert blocks.is_swapped(1)
        assert blocks.num_free == 5
        orders = check(blocks)
        assert orders.out == []
        assert [block for block, _ in orders.late_out] == [table[3]], "only the partly filled block is copied at once"
        run(blocks, 2, [9] * 7)
        orders = check(blocks)
        assert {block for block, _ in orders.out} <= set(table[:3]), "full blocks go when their place is needed"
        blocks.free(2)
        assert blocks.begin(1, tokens) == 7
        assert not blocks.is_swapped(1)
        check(blocks)
        blocks.free(1)
        check(blocks)
        assert blocks.tier.pool.num_free == 8
        assert blocks.num_free == 5


def test_what_is_still_on_the_device_costs_nothing():
    blocks = manager(8, 8)
    tokens = [1, 2, 3, 4, 5]
    run(blocks, 1, tokens)
    assert blocks.preempt(1, tokens, 4)
    assert blocks.begin(1, tokens) == 4
    assert not check(blocks)


def test_a_block_freed_by_its_copy_and_used_at_once_is_copied_before_the_step():
    blocks = manager(2, 4)
    run(blocks, 1, [1, 2, 3])
    tail = blocks.table(1)[1]
    blocks.preempt(1, [1, 2, 3, 4], 3)
    blocks.begin(2, [5])
    assert blocks.table(2) == [tail]
    orders = check(blocks)
    assert [block for block, _ in orders.out] == [tail]
    assert orders.late_out == []


def test_wanted_content_is_never_dropped_for_cached_content():
    blocks = manager(3, 3)
    run(blocks, 1, [1, 2, 3, 4, 5])
    assert blocks.preempt(1, [1, 2, 3, 4, 5, 6], 5)
    check(blocks)
    assert blocks.tier.room == 0
    for i in range(2, 9):
        run(blocks, i, [10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3, 0])
        blocks.free(i)
        check(blocks)
    assert blocks.begin(1, [1, 2, 3, 4, 5, 6]) == 5
    check(blocks)


def test_what_finds_no_room_is_computed_anew():
    blocks = manager(8, 2)
    tokens = list(range(9))
    run(blocks, 1, tokens)
    assert blocks.preempt(1, tokens, 8)
    check(blocks)
    run(blocks, 2, list(range(20, 36)))
    check(blocks)
    blocks.free(2)
    assert blocks.begin(1, tokens) == 4, "two blocks had room"
    check(blocks)


def test_few_tokens_in_the_last_block_are_computed_anew():
    # 4 tokens a block, 1 ms a token, 2 ms for a block's two copies.
    for tail, kept in ((1, 8), (2, 10), (3, 11)):
        blocks = manager(8, 8, size=4, threshold=1.0)
        tokens = list(range(8 + tail + 1))
        run(blocks, 1, tokens[: 8 + tail])
        assert blocks.preempt(1, tokens, 8 + tail)
        assert blocks.begin(1, tokens) == kept
        check(blocks)


def test_cost_decides_between_copies_and_computing():
    for prefill, swapped in ((500.0, True), (1000.0, True), (1001.0, False)):
        blocks = manager(8, 8, threshold=1.0, prefill=prefill)
        run(blocks, 1, list(range(7)))
        assert blocks.preempt(1, list(range(7)), 6) is swapped
        check(blocks)


def test_blocks_that_others_keep_on_the_device_make_swapping_cheaper_and_are_not_copied():
    blocks = manager(12, 12, threshold=1.0, prefill=900.0)
    run(blocks, 1, [1, 2, 3, 4, 5, 6, 7])
    run(blocks, 2, [1, 2, 3, 4, 5, 6, 8, 9, 9])
    assert blocks.preempt(2, [1, 2, 3, 4, 5, 6, 8, 9, 9], 8)
    check(blocks)
    assert blocks.begin(2, [1, 2, 3, 4, 5, 6, 8, 9, 9]) == 8
    assert not check(blocks), "nothing had to move"


def test_what_forked_sequences_share_makes_swapping_cheaper_where_nothing_else_would_keep_it():
    # A full block is computed in 1.8 ms and copied in 2: alone it does not pay.
    for caching, others, swapped in ((False, True, True), (False, False, False), (True, True, False)):
        blocks = manager(9, 9, caching=caching, threshold=1.0, prefill=1100.0)
        tokens = [1, 2, 3, 4]
        run(blocks, 1, tokens)
        if others:
            blocks.fork(1, 2, 4)
        assert blocks.reserve(1, 4, 6) == []
        blocks.commit(1, [1, 2, 3, 4, 5, 6], 6)
        assert blocks.preempt(1, [1, 2, 3, 4, 5, 6, 7], 6) is swapped
        check(blocks)


def test_shared_content_takes_room_once():
    blocks = manager(8, 5)
    tokens = [1, 2, 3, 4, 5]
    run(blocks, 1, tokens)
    blocks.fork(1, 2, 5)
    blocks.fork(1, 3, 5)
    for seq in (1, 2, 3):
        assert blocks.preempt(seq, [*tokens, seq], 5)
        check(blocks)
    assert blocks.tier.room == 0
    for seq in (1, 2, 3):
        assert blocks.begin(seq, [*tokens, seq]) == 5
        check(blocks)


def test_a_block_is_copied_on_write_before_anything_comes_into_its_place():
    blocks = manager(4, 8)
    run(blocks, 1, [1, 2, 3])
    blocks.fork(1, 2, 3)
    [(source, target)] = blocks.reserve(1, 3, 4)
    blocks.free(2)
    assert blocks.num_free == 1, "the source is in use until the copy is ordered"
    blocks.begin(3, [9])
    assert blocks.table(3) not in ([source], [target])
    check(blocks)
    assert blocks.num_free == 1
    blocks.begin(4, [9])
    assert blocks.table(4) == [source]


def test_what_others_computed_meanwhile_is_used_instead_of_the_last_block():
    blocks = manager(8, 8)
    run(blocks, 1, [1, 2, 3])
    assert blocks.preempt(1, [1, 2, 3, 4, 5, 6], 3)
    check(blocks)
    run(blocks, 2, [1, 2, 3, 4, 9])
    assert blocks.begin(1, [1, 2, 3, 4, 5, 6]) == 4
    assert len(blocks.table(1)) == 3
    assert not check(blocks)
    assert blocks.tier.pool.num_free == 8


def test_forked_sequences_share_what_is_swapped():
    for caching in (True, False):
        blocks = manager(6, 9, caching=caching)
        tokens = [1, 2, 3, 4, 5]
        run(blocks, 1, tokens)
        blocks.fork(1, 2, 5)
        blocks.fork(1, 3, 5)
        for seq in (2, 3):
            assert blocks.preempt(seq, [*tokens, seq], 5)
        orders = check(blocks)
        assert len(orders.out) == 2, "the shared last block is still written by the first: copied before the step"
        assert blocks.preempt(1, [*tokens, 1], 5)
        check(blocks)
        assert blocks.tier.room == 9 - 2 - 3, "two full blocks in common and three partly filled ones"
        run(blocks, 4, [9] * 11)
        orders = check(blocks)
        assert len(orders.out) <= 2
        blocks.free(4)
        for seq in (1, 2, 3):
            assert blocks.begin(seq, [*tokens, seq]) == 5
        orders = check(blocks)
        assert blocks.table(1)[:2] == blocks.table(2)[:2] == blocks.table(3)[:2]
        assert len({blocks.table(seq)[2] for seq in (1, 2, 3)}) == 3
        for seq in (1, 2, 3):
            blocks.free(seq)
        check(blocks)
        assert blocks.tier.pool.num_free == 9


def test_prefix_caching_off_finds_nothing_of_others():
    blocks = manager(6, 9, caching=False)
    tokens = [1, 2, 3, 4, 5]
    run(blocks, 1, tokens)
    blocks.preempt(1, tokens, 4)
    assert blocks.begin(2, tokens) == 0
    check(blocks)
    blocks.free(1)
    assert blocks.begin(1, tokens) == 0, "what was let go is not found either"
    check(blocks)


def test_prefix_caching_off_swaps_equal_prompts_apart():
    blocks = manager(8, 8, caching=False)
    for seq in (1, 2):
        run(blocks, seq, [1, 2, 3, 4])
    for seq in (1, 2):
        assert blocks.preempt(seq, [1, 2, 3, 4, 5], 4)
    assert blocks.tier.room == 8 - 4
    blocks.begin(1, [1, 2, 3, 4, 5])
    blocks.begin(2, [1, 2, 3, 4, 5])
    assert not set(blocks.table(1)) & set(blocks.table(2))


def test_a_hit_in_cpu_memory_is_passed_over_where_it_would_take_the_room_of_what_is_wanted():
    blocks = manager(4, 1)
    run(blocks, 1, [1, 2, 3])
    blocks.free(1)
    blocks.begin(2, [9] * 8)  # never computed: its blocks have no names
    check(blocks)
    blocks.free(2)
    run(blocks, 3, [5, 6, 7])
    assert blocks.preempt(3, [5, 6, 7], 2)
    check(blocks)
    assert blocks.tier.room == 0
    assert blocks.tier.find(block_hash(root_hash(b""), [1, 2])) is not None
    assert blocks.begin(4, [1, 2, 4, 4, 4, 4, 4]) == 0
    check(blocks)
    blocks.free(4)
    assert blocks.begin(3, [5, 6, 7]) == 2


def test_abort_while_swapped_gives_all_back():
    blocks = manager(4, 4)
    run(blocks, 1, [1, 2, 3, 4, 5])
    blocks.preempt(1, [1, 2, 3, 4, 5], 5)
    blocks.free(1)
    assert not blocks.is_swapped(1)
    assert not check(blocks), "a copy for a sequence that is gone is not made"
    assert blocks.tier.pool.num_free == blocks.num_free == 4


def test_late_blocks_are_left_out_of_the_step_and_so_is_who_shares_them():
    blocks = manager(6, 6, late=0.0)
    tokens = [1, 2, 3, 4, 5]
    run(blocks, 1, tokens)
    blocks.preempt(1, tokens, 4)
    run(blocks, 2, [9] * 12)
    check(blocks)
    blocks.free(2)
    assert blocks.begin(1, tokens, overlap=True) == 4
    assert blocks.is_late(1)
    assert blocks.begin(3, [1, 2, 3, 4, 6], overlap=True) == 4
    assert blocks.is_late(3)
    with pytest.raises(AssertionError, match="being filled"):
        blocks.preempt(1, tokens, 4)
    orders = check(blocks)
    assert orders.in_ == []
    assert len(orders.late_in) == 2
    assert not blocks.is_late(1)


def test_next_blocks_to_go_are_copied_ahead():
    blocks = manager(4, 8, late=0.0)
    run(blocks, 1, [1, 2, 3, 4, 5, 6, 7])
    blocks.free(1)
    check(blocks)
    blocks.copy_ahead(2)  # an unnamed block, and the end of the prompt
    orders = check(blocks)
    assert len(orders.late_out) == 1
    assert not orders.out
    run(blocks, 2, [9, 9, 9])
    assert not check(blocks).out, "it was there already"
    assert manager(4, 8, late=math.inf).policy.blocks_ahead == 0


def test_forgotten_content_is_found_nowhere():
    blocks = manager(4, 8)
    tokens = [1, 2, 3, 4, 5, 6]
    run(blocks, 1, tokens)
    blocks.preempt(1, [*tokens, 7], 6)
    check(blocks)
    run(blocks, 2, [9] * 6)  # some of sequence 1 goes to CPU memory, and a prompt is in the prefix cache
    check(blocks)
    run(blocks, 3, [8])
    blocks.forget_content()
    assert not blocks.is_swapped(1)
    assert blocks.tier.pool.num_free == 8
    blocks.free(2)
    check(blocks)
    assert blocks.begin(1, [*tokens, 7], headroom=0) is None, "sequence 3 still has its block"
    blocks.free(3)
    assert blocks.begin(1, [*tokens, 7]) == 0
    assert not check(blocks)
    blocks.free(1)
    assert blocks.begin(2, [9] * 6) == 0


def test_a_sequence_goes_on_when_content_was_forgotten():
    blocks = manager(6, 8)
    run(blocks, 1, [1, 2, 3, 4, 5])
    blocks.forget_content()
    assert blocks.reserve(1, 5, 8) == []
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks.commit(1, tokens, 8)
    assert blocks.preempt(1, [*tokens, 9], 8)
    assert blocks.begin(1, [*tokens, 9]) == 8
    check(blocks)


def test_check_integrity_sees_both_tiers():
    blocks = manager(4, 8)
    run(blocks, 1, [1, 2, 3])
    blocks.preempt(1, [1, 2, 3], 3)
    check(blocks)
    [name] = blocks._swapped.get(1).names
    blocks.tier._wanted[name] += 1
    with pytest.raises(AssertionError, match="what is wanted"):
        blocks.check_integrity()
    blocks.tier._wanted[name] -= 1
    blocks.check_integrity()
    blocks.tier.pool._users[blocks._swapped.get(1).tail] = 0
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check_integrity()
    blocks.tier.pool._users[blocks._swapped.get(1).tail] = 1
    blocks._pool.forget(blocks._pool.find(name))
    with pytest.raises(AssertionError, match="lost"):
        blocks.check_integrity()

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qengine.engine.block_manager import BlockManager, block_hash, root_hash


def test_begin_takes_whole_blocks_and_free_gives_them_back():
    blocks = BlockManager(5, 4)
    assert blocks.begin(1, range(9)) == 0
    assert len(blocks.table(1)) == 3
    assert blocks.num_free == 2
    assert blocks.begin(2, range(100, 109)) is None
    assert blocks.num_free == 2, "a refused begin must change nothing"
    blocks.free(1)
    assert blocks.num_free == 5
    blocks.check_integrity()


def test_equal_prompt_beginning_is_found_but_one_token_is_left():
    blocks = BlockManager(8, 4)
    blocks.begin(1, range(8))
    blocks.commit(1, range(8), 8)
    assert blocks.begin(2, range(8)) == 4
    assert blocks.begin(3, range(9)) == 8
    assert blocks.table(3)[:2] == blocks.table(1)
    assert blocks.stats.hit_tokens == 12
    blocks.check_integrity()


def test_uncommitted_blocks_are_never_found():
    blocks = BlockManager(8, 4)
    blocks.begin(1, range(8))
    assert blocks.begin(2, range(9)) == 0


def test_same_block_after_another_beginning_is_not_found():
    blocks = BlockManager(8, 2)
    blocks.begin(1, [1, 2, 3, 4])
    blocks.commit(1, [1, 2, 3, 4], 4)
    assert blocks.begin(2, [9, 9, 3, 4, 5]) == 0


def test_salts_and_token_ids_cannot_stand_for_each_other():
    blocks = BlockManager(32, 2)
    blocks.begin(1, [1, 2, 3], salt=b"a")
    blocks.commit(1, [1, 2, 3], 3)
    assert blocks.begin(2, [1, 2, 3]) == 0
    assert blocks.begin(3, [1, 2, 3], salt=b"b") == 0
    assert blocks.begin(4, [1, 2, 3], salt=b"a") == 2
    # A salt made of exactly what a block's hash is made of finds nothing either.
    assert root_hash(b"a") != root_hash(b"")
    parent = root_hash(b"")
    crafted = parent + b"".join(t.to_bytes(8, "little") for t in (1, 2))
    assert root_hash(crafted) != block_hash(parent, [1, 2])
    assert root_hash(b"b" + crafted) != block_hash(parent, [1, 2])
    # Long ids differ from concatenations of short ones.
    assert block_hash(parent, [1, 2]) != block_hash(parent, [12])
    assert block_hash(parent, [258]) != block_hash(parent, [2, 1])


def test_least_recently_used_block_is_evicted_and_a_prompts_end_before_its_beginning():
    blocks = BlockManager(4, 2)
    blocks.begin(1, [1, 2, 3, 4])
    blocks.commit(1, [1, 2, 3, 4], 4)
    blocks.free(1)
    blocks.begin(2, [5, 6, 7, 8])
    blocks.commit(2, [5, 6, 7, 8], 4)
    blocks.free(2)
    assert blocks.begin(3, [0]) == 0  # evicts the block of [3, 4]
    assert blocks.stats.evicted_blocks == 1
    blocks.free(3)
    assert blocks.begin(4, [1, 2, 3, 4, 9]) == 2
    blocks.free(4)
    blocks.check_integrity()


def test_unfindable_free_blocks_are_used_before_findable_ones():
    blocks = BlockManager(3, 2)
    blocks.begin(1, [1, 2])
    blocks.commit(1, [1, 2], 2)
    blocks.begin(2, [7])
    blocks.free(1)
    blocks.free(2)
    blocks.begin(3, [8])
    blocks.begin(4, [9])
    assert blocks.stats.evicted_blocks == 0


def test_fork_shares_and_the_first_writer_copies():
    blocks = BlockManager(6, 4)
    blocks.begin(1, range(6))
    blocks.fork(1, 2, 6)
    assert blocks.table(2) == blocks.table(1)
    assert blocks.num_free == 4
    shared = blocks.table(1)[1]
    [(source, target)] = blocks.reserve(1, 6, 7)
    assert source == shared
    assert blocks.table(1) == [blocks.table(2)[0], target]
    assert blocks.reserve(2, 6, 7) == [], "the last user writes in place"
    blocks.free(1)
    blocks.free(2)
    assert blocks.num_free == 6
    blocks.check_integrity()


def test_reserve_changes_nothing_when_blocks_run_out():
    blocks = BlockManager(3, 2)
    blocks.begin(1, range(3))
    blocks.fork(1, 2, 3)
    before = list(blocks.table(1))
    assert blocks.reserve(1, 3, 5) is None  # one copy and one new block, but one block is free
    assert blocks.table(1) == before
    blocks.check_integrity()
    assert blocks.reserve(1, 3, 4) is not None


def test_caching_off_finds_nothing():
    blocks = BlockManager(8, 2, enable_prefix_caching=False)
    blocks.begin(1, range(5))
    blocks.commit(1, range(5), 5)
    assert blocks.begin(2, range(5)) == 0
    assert blocks.stats.queried_tokens == 0


def test_check_integrity_notices_a_lost_block():
    blocks = BlockManager(4, 2)
    blocks.begin(1, range(3))
    blocks.table(1).pop()
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check_integrity()


class Histories(RuleBasedStateMachine):
    """Random histories of begin, grow, fork and free; content is modelled as what each position of each block holds."""

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(7, 2)
        self.content = {}
        self.tokens = {}
        self.next_id = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7), salt=st.sampled_from([b"", b"x"]))
    def begin(self, tokens, salt):
        seq, self.next_id = self.next_id, self.next_id + 1
        tokens = list(tokens)
        cached = self.blocks.begin(seq, tokens, salt=salt)
        if cached is None:
            return
        self.tokens[seq] = tokens
        for position in range(cached):
            self.check(seq, position, salt)
        self.write(seq, cached, salt)

    def write(self, seq, start, salt):
        tokens, table = self.tokens[seq], self.blocks.table(seq)
        for position in range(start, len(tokens)):
            self.content[table[position // 2], position % 2] = (salt, tuple(tokens[: position + 1]))
        self.blocks.commit(seq, tokens, len(tokens))
        self.salt = {**getattr(self, "salt", {}), seq: salt}

    def check(self, seq, position, salt):
        block = self.blocks.table(seq)[position // 2]
        assert self.content[block, position % 2] == (salt, tuple(self.tokens[seq][: position + 1]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data, more):
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[seq])
        copies = self.blocks.reserve(seq, start, start + len(more))
        if copies is None:
            return
        for source, target in copies:
            for offset in range(2):
                if (source, offset) in self.content:
                    self.content[target, offset] = self.content[source, offset]
        self.tokens[seq] = self.tokens[seq] + more
        self.write(seq, start, self.salt[seq])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        child, self.next_id = self.next_id, self.next_id + 1
        self.blocks.fork(seq, child, len(self.tokens[seq]))
        self.tokens[child] = list(self.tokens[seq])
        self.salt[child] = self.salt[seq]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        self.blocks.free(seq)
        del self.tokens[seq]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        self.blocks.check_integrity()
        for seq, tokens in self.tokens.items():
            for position in range(len(tokens)):
                self.check(seq, position, self.salt[seq])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

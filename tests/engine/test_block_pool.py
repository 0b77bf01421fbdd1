"""One tier's blocks against the plainest model of them: a list of free blocks in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qengine.engine.block_pool import BlockPool

SIZE = 6


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.free = list(range(SIZE))
        self.users = dict.fromkeys(range(SIZE), 0)
        self.names = {}
        self.fresh = 0

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self):
        block = self.pool.allocate()
        assert block == self.free.pop(0)
        self.users[block] = 1
        self.names.pop(block, None)

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def take(self, data):
        block = data.draw(st.sampled_from([b for b, n in self.users.items() if n or b in self.names]))
        self.pool.take(block)
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from([b for b, n in self.users.items() if n]))
        self.pool.release(block)
        self.users[block] -= 1
        if not self.users[block]:
            self.free.insert(len(self.free) if block in self.names else 0, block)

    @precondition(lambda self: any(n and b not in self.names for b, n in self.users.items()))
    @rule(data=st.data())
    def set_name(self, data):
        block = data.draw(st.sampled_from([b for b, n in self.users.items() if n and b not in self.names]))
        self.fresh += 1
        self.names[block] = bytes([self.fresh])
        self.pool.set_name(block, self.names[block])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.forget(block)
        del self.names[block]
        if block in self.free:
            self.free.remove(block)
            self.free.insert(0, block)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def touch(self, data):
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.touch(block)
        if block in self.free:
            self.free.remove(block)
            self.free.append(block)

    @rule()
    def forget_all(self):
        for block in list(self.names):  # in the order in which they got their names
            if block in self.free:
                self.free.remove(block)
                self.free.insert(0, block)
        self.names = {}
        self.pool.forget_all()

    @invariant()
    def agrees(self):
        used = {block: count for block, count in self.users.items() if count}
        self.pool.check_integrity(used)
        assert self.pool.num_free == len(self.free)
        for count in (0, 1, 2, SIZE, SIZE + 3):
            assert self.pool.upcoming(count) == self.free[:count]
        for block, name in self.names.items():
            assert self.pool.find(name) == block
            assert self.pool.name_of(block) == name


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_misuse_is_an_error():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.set_name(block, b"a")
    with pytest.raises(AssertionError, match="another name"):
        pool.set_name(block, b"b")
    with pytest.raises(AssertionError, match="this name already"):
        pool.set_name(pool.allocate(), b"a")
    pool.release(block)
    with pytest.raises(AssertionError, match="not used"):
        pool.release(block)


def test_a_pool_of_billions_costs_nothing_before_it_is_used():
    pool = BlockPool(10**12)
    assert pool.upcoming(3) == [0, 1, 2]
    assert pool.allocate() == 0
    assert pool.num_free == 10**12 - 1

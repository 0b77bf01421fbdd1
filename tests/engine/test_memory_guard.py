"""The limit of a GPU's memory: what torch may have of it, and when that is counted anew."""

import pytest
import torch
import triton

from qengine.engine import memory_guard
from qengine.engine.gpu_memory import MemoryLimit, with_room
from qengine.engine.memory_guard import MemoryGuard

MIB = 1 << 20
TOTAL = 1000 * MIB
DEVICE = torch.device("cuda", 0)


class Card:
    """What torch.cuda says and is told."""

    def __init__(self, monkeypatch):
        self.outside, self.reserved, self.allowed, self.emptied = 100 * MIB, 0, None, 0
        monkeypatch.setattr(memory_guard, "outside_bytes", lambda device: self.outside)
        for name, value in {
            "get_device_properties": lambda device: type("P", (), {"total_memory": TOTAL}),
            "set_per_process_memory_fraction": self.allow,
            "memory_reserved": lambda device: self.reserved,
            "empty_cache": self.empty,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def allow(self, share, device):
        self.allowed = round(share * TOTAL / MIB)

    def empty(self):
        self.emptied += 1


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


def test_torch_may_have_what_the_rest_leaves(card):
    guard = MemoryGuard(MemoryLimit(800 * MIB, "test"), DEVICE, 16 * MIB)
    assert card.allowed == 800 - 100 - 16
    card.outside = 150 * MIB
    guard.check()
    assert card.allowed == 684, "nobody said that anything has grown"
    guard.grown()
    guard.check()
    assert (card.allowed, card.emptied) == (634, 0)
    card.outside = 160 * MIB  # what was captured is only now given its memory
    guard.check()
    assert card.allowed == 624
    card.outside = 170 * MIB
    guard.check()
    assert card.allowed == 624
    guard.close()
    assert card.allowed == 1000


def test_a_kernel_that_is_loaded_is_noticed_and_unused_memory_given_back(card):
    guard = MemoryGuard(MemoryLimit(800 * MIB, "test"), DEVICE, 16 * MIB)
    card.outside, card.reserved = 300 * MIB, 600 * MIB
    triton.knobs.runtime.kernel_load_end_hook(None, None, "kernel", {}, "hash")
    guard.check()
    assert (card.allowed, card.emptied) == (484, 1)
    guard.close()
    assert guard._loaded not in triton.knobs.runtime.kernel_load_end_hook.calls
    guard.close()


def test_a_limit_below_what_is_taken_leaves_nothing(card):
    MemoryGuard(MemoryLimit(50 * MIB, "test"), DEVICE, 16 * MIB).close()
    card.outside = 0
    MemoryGuard(MemoryLimit(2 * TOTAL, "test"), DEVICE, 0)
    assert card.allowed == 1000


def test_what_finds_no_memory_is_tried_once_more_with_all_that_is_unused(card):
    held = []

    def call(failures):
        held.append(torch.empty(1))
        if len(held) <= failures:
            raise torch.cuda.OutOfMemoryError("no memory")
        return card.emptied

    assert with_room(DEVICE, lambda: call(0)) == 0
    held.clear()
    assert with_room(DEVICE, lambda: call(1)) == 1
    held.clear()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        with_room(DEVICE, lambda: call(2))
    assert card.emptied == 2

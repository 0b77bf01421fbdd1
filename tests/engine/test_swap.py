"""The cost model, the copies between the tiers and their order, and the size of the CPU tier."""

import math
import random
import warnings

import pytest
import torch
from fake_device import FakeDevice

from qengine.config import CacheConfig
from qengine.engine.sampler import Samples
from qengine.engine.step import StepResult
from qengine.engine.swap import SwapSpace, TensorSwapDevice
from qengine.engine.swap_orders import SwapOrders
from qengine.engine.swap_policy import SwapPolicy
from qengine.engine.swap_setup import GIB, cpu_blocks, prefill_rate, swap_policy


def policy(threshold=1.0, late_seconds=1e-3):
    """A block of 16 tokens: out 1 ms, in 2 ms; computed in 4 ms."""
    return SwapPolicy(
        1000, 16, out_rate=1e6, in_rate=5e5, prefill_rate=4000, threshold=threshold, **{"late_seconds": late_seconds}
    )


def test_copies_pay_where_computing_takes_threshold_times_as_long():
    assert policy().pays(16, 1, 1)
    assert policy(4 / 3).pays(16, 1, 1)
    assert not policy(1.34).pays(16, 1, 1)
    assert not policy().pays(11, 1, 1), "11 tokens are computed in less than a block's two copies take"
    assert policy().pays(12, 1, 1)
    assert policy(2.0).pays(16, 0, 1), "what is in CPU memory already is copied back only"
    assert not policy(2.1).pays(16, 0, 1)


def test_threshold_0_always_copies_and_inf_never():
    assert policy(0.0).pays(0, 1000, 1000)
    assert not policy(math.inf).pays(10**6, 0, 0)
    assert not policy(math.inf).keeps_evicted
    assert policy().keeps_evicted


def test_long_copies_back_are_late_and_short_ones_waited_for():
    assert not policy(late_seconds=4e-3).may_be_late(1)
    assert policy(late_seconds=4e-3).may_be_late(2)
    assert not policy(late_seconds=math.inf).may_be_late(10**6)
    assert policy(late_seconds=math.inf).blocks_ahead == 0
    assert policy().blocks_ahead == 5


class Forgetful(FakeDevice):
    """A device that leaves out one of the waits."""

    omits = None

    def swap_waits(self):
        if self.omits != "swap waits for compute":
            super().swap_waits()

    def compute_waits(self, event):
        if self.omits != "compute waits for swap":
            super().compute_waits(event)

    def enqueue(self, stream, name, action):
        if stream == "swap" and self.omits == "order on the swap stream":
            waits, self.waits["swap"] = self.waits["swap"], []
            self.last["swap"], self.waits["swap"] = None, waits
            op = super().enqueue(stream, name, action)
            self.waits["swap"] = waits
            return op
        return super().enqueue(stream, name, action)


class HastySpace(SwapSpace):
    """Forgets that the next step must wait for late copies."""

    def begin_step(self, orders):
        super().begin_step(orders)
        self._late = None


def history(seed, omits=None, space_class=SwapSpace, steps=25):
    """Random orders, each with a step that reads and overwrites what it may; all reads are checked."""
    rng = random.Random(seed)
    device = Forgetful(12, 7, rng)
    device.omits = omits
    space = space_class(device)
    blocks, host, fresh = [None] * 12, [None] * 7, iter(range(10**6))
    for _ in range(steps):
        order, cpu = rng.sample(range(12), 12), rng.sample(range(7), 7)
        count = rng.choice([0, 0, 1, 2])
        out = [(order.pop(), cpu.pop()) for _ in range(count)]
        late_out = [(order.pop(), cpu.pop()) for _ in range(rng.choice([0, 0, 1, 2]))]
        filled = [cpu for _, cpu in out]  # may be read back in the same step, into a block of its own
        sources = rng.sample(cpu + filled, rng.choice([0, 0, 1, 2]))
        in_, late_in = [], []
        for source in sources:
            (in_ if rng.random() < 0.5 else late_in).append((source, order.pop()))
        for source, target in (*out, *late_out):
            host[target] = blocks[source]
        for source, target in (*in_, *late_in):
            blocks[target] = host[source]
        space.begin_step(SwapOrders(out, in_, late_out, late_in))
        usable = order + [block for block, _ in out] + [block for _, block in in_]
        read = {block: blocks[block] for block in usable}
        for block in rng.sample(usable, 3):
            blocks[block] = next(fresh)
        written = {block: blocks[block] for block in usable}

        def step(read=read, written=written):
            for block, value in read.items():
                assert device.blocks[block] == value, f"block {block} holds {device.blocks[block]}, not {value}"
            for block, value in written.items():
                device.blocks[block] = value

        op = device.compute("step", step)
        if rng.random() < 0.7:  # else the CPU goes ahead
            device.finish(op)
    device.synchronize()
    assert device.blocks == blocks
    assert device.host == host


def test_copies_are_ordered_on_a_device_that_reorders_what_it_may():
    for seed in range(60):
        history(seed)


@pytest.mark.parametrize(
    ("omits", "space_class"),
    [
        ("swap waits for compute", SwapSpace),
        ("compute waits for swap", SwapSpace),
        ("order on the swap stream", SwapSpace),
        (None, HastySpace),
    ],
)
def test_each_wait_is_needed(omits, space_class):
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(60):
            history(seed, omits, space_class)


def test_a_step_without_orders_costs_nothing_but_the_wait_for_late_copies():
    device = FakeDevice(4, 4, random.Random(0))
    space = SwapSpace(device)
    space.begin_step(SwapOrders())
    assert not device.ops
    assert not device.waits["compute"]
    space.begin_step(SwapOrders(late_out=[(0, 1)]))
    assert not device.waits["compute"], "the step waits for a copy that should overlap it"
    space.begin_step(SwapOrders())
    assert device.waits["compute"] == [device.last["swap"]]


def test_tensor_blocks_go_there_and_back_bit_by_bit():
    tensors = [torch.randn(9, 4, 2, 3), torch.randint(-128, 128, (9, 4, 2), dtype=torch.int8), torch.randn(9, 5).half()]
    before = [t.clone() for t in tensors]
    device = TensorSwapDevice(tensors, 6)
    for host in device._host:
        host.fill_(77)
    space = SwapSpace(device)
    assert space.block_bytes == 4 * 2 * 3 * 4 + 4 * 2 + 5 * 2
    assert space.num_blocks == 6
    space.begin_step(SwapOrders(out=[(1, 5), (8, 0)], late_out=[(3, 2)]))
    for t in tensors:
        t[[1, 3, 8]] = 55
    space.begin_step(SwapOrders(in_=[(5, 8)], late_in=[(0, 1), (2, 3)]))
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(t[[8, 1, 3]], old[[1, 8, 3]])
        assert torch.equal(t[[0, 2, 4, 5, 6, 7]], old[[0, 2, 4, 5, 6, 7]]), "other blocks were touched"
    space.close()


def test_out_comes_before_in():
    tensor = torch.arange(4.0)[:, None]
    space = SwapSpace(TensorSwapDevice([tensor], 2))
    space.begin_step(SwapOrders(out=[(2, 1)], in_=[(1, 0)]))
    assert tensor[0, 0] == 2


def test_rates_are_of_bytes_moved():
    rates = SwapSpace(TensorSwapDevice([torch.zeros(64, 1 << 14)], 32)).measure()
    assert 1e5 < rates.out < 1e13
    assert 1e5 < rates.in_ < 1e13


def config(**values):
    return CacheConfig(**values)


def test_cpu_tier_has_the_blocks_that_swap_space_holds():
    assert cpu_blocks(config(swap_space=2), 1 << 20, 64 * GIB) == 2048
    assert cpu_blocks(config(swap_space=0), 1 << 20, 64 * GIB) == 0
    assert cpu_blocks(config(swap_space=4, swap_threshold=math.inf), 1 << 20, 64 * GIB) == 0
    with pytest.warns(UserWarning, match=r"swap_space=5 GiB is lowered to 1\.50: half of the 3\.00 GiB"):
        assert cpu_blocks(config(swap_space=5), 1 << 20, 3 * GIB) == 1536
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu_blocks(config(), 1 << 20, 3 * GIB) == 1536, "nobody asked for the default"
    with pytest.warns(UserWarning, match="holds no block of 1048577 bytes"):
        assert cpu_blocks(config(swap_space=1 / 1024), (1 << 20) + 1, 3 * GIB) == 0


class OneStep:
    """Computes a token in 50 microseconds of its own clock, the first time in twenty times as long."""

    def __init__(self, monkeypatch):
        self.items, self.now = [], 0.0
        monkeypatch.setattr("qengine.engine.swap_setup.time.perf_counter", lambda: self.now)

    def run(self, items, copies):
        self.items += items
        self.now += 5e-5 * (items[0].end - items[0].start) * (20 if len(self.items) == 1 else 1)
        return StepResult(Samples([], []))


def test_prefill_rate_leaves_the_first_step_out_and_uses_whole_blocks(monkeypatch):
    runner = OneStep(monkeypatch)
    assert prefill_rate(runner, 50, block_size=16) == pytest.approx(20_000)
    item = runner.items[0]
    assert (item.start, item.end, len(item.token_ids), item.block_table) == (0, 50, 50, [0, 1, 2, 3])
    assert len(item.rows) == 1, "its token is waited for"


def test_policy_is_measured_unless_swapping_is_always_wanted(monkeypatch):
    space, runner = SwapSpace(TensorSwapDevice([torch.zeros(64, 1 << 10)], 32)), OneStep(monkeypatch)
    made = swap_policy(space, config(swap_threshold=1.5), runner, 40, overlaps=False)
    assert (made.block_bytes, made.block_size, made.threshold, made.late_seconds) == (4096, 16, 1.5, math.inf)
    assert made.prefill_rate == pytest.approx(20_000)
    runner.items.clear()
    assert swap_policy(space, config(swap_threshold=0), runner, 40, overlaps=True).late_seconds == 1e-3
    assert not runner.items

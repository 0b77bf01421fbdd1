"""The CPU tier beside a real GPU: bytes go there and back, and the streams wait for each other as far as they must."""

import random

import pytest
import torch

from qengine.engine.swap import SwapSpace
from qengine.engine.swap_orders import SwapOrders

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, CPU_BLOCKS = 5, 24, 17


LAYOUT = ("int8", 3, 40, 16)


@pytest.fixture(params=["all at once", "three blocks at a time", "two layers at a time"])
def setup(request, monkeypatch):
    from qengine.engine import cuda_swap
    from qengine.kernels.paged_attn.cache import BlockLayout, KVPool

    pool = KVPool.allocate(BlockLayout(*LAYOUT), LAYERS, BLOCKS, "cuda")
    piece = pool.layout.block_bytes
    if request.param != "all at once":
        size = 3 * LAYERS * piece + 100 if request.param.startswith("three") else 2 * piece + 100
        monkeypatch.setattr(cuda_swap, "STAGING_BYTES", size)
    compute = torch.cuda.Stream()
    device = cuda_swap.CudaSwapDevice(pool, CPU_BLOCKS, compute)
    space = SwapSpace(device)
    yield pool, compute, device, space
    space.close()


def fill(pool, block, value):
    """Give a block of every layer bytes of its own."""
    layers = torch.arange(LAYERS, device="cuda")[:, None]
    places = torch.arange(pool.storage.shape[2], device="cuda")[None]
    pool.storage[:, block] = ((value * 31 + layers * 7 + places) % 251).to(torch.uint8)


def holds(pool, block, value):
    want = pool.storage[:, block].clone()
    fill(pool, block, value)
    return bool((pool.storage[:, block] == want).all())


def test_random_steps_keep_every_block(setup):
    pool, compute, _, space = setup
    rng = random.Random(3)
    torch.cuda.synchronize()
    device, host, fresh = dict.fromkeys(range(BLOCKS)), dict.fromkeys(range(CPU_BLOCKS)), 0
    for _ in range(60):
        order = rng.sample(range(BLOCKS), BLOCKS)
        cpu = rng.sample(range(CPU_BLOCKS), CPU_BLOCKS)
        out, late_out = [(order.pop(), cpu.pop()) for _ in range(2)], [(order.pop(), cpu.pop()) for _ in range(2)]
        known = [block for block in cpu if host[block] is not None]
        in_, late_in = [], []
        for block in known[:4]:
            (in_ if rng.random() < 0.5 else late_in).append((block, order.pop()))
        before = dict(host)
        for source, target in (*out, *late_out):
            host[target] = device[source]
        for source, target in (*in_, *late_in):
            device[target] = before[source]
        space.begin_step(SwapOrders(out, in_, late_out, late_in))
        with torch.cuda.stream(compute):
            torch.cuda._sleep(rng.choice([0, 200_000, 2_000_000]))
            # A step overwrites what was copied out in time, and other blocks, but none of the late copies'.
            for block in [block for block, _ in out] + order[:4]:
                fresh += 1
                fill(pool, block, fresh)
                device[block] = fresh
    space.begin_step(SwapOrders())
    torch.cuda.synchronize()
    assert fresh > 100
    for block, value in device.items():
        if value is not None:
            assert holds(pool, block, value), f"device block {block}"
    known = [(cpu, block) for block, cpu in enumerate(cpu for cpu, value in host.items() if value is not None)]
    space.begin_step(SwapOrders(in_=known))
    torch.cuda.synchronize()
    for cpu, block in known:
        assert holds(pool, block, host[cpu]), f"CPU block {cpu}"


def test_nothing_waits_on_the_cpu(setup):
    _, compute, _, space = setup
    with torch.cuda.stream(compute):
        torch.cuda._sleep(1_000_000_000)
        done = torch.cuda.Event()
        done.record(compute)
    space.begin_step(SwapOrders(out=[(0, 3), (1, 9)], in_=[(2, 5)], late_out=[(7, 4)], late_in=[(1, 8)]))
    assert not done.query(), "begin_step waited for the device"
    torch.cuda.synchronize()


def test_late_copies_overlap_the_step(setup):
    _, compute, device, space = setup
    device.copy_out([(0, 0)])  # compiled before the clock runs
    torch.cuda.synchronize()
    space.begin_step(SwapOrders(late_out=[(1, 1)]))
    copied = device.mark()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(1_000_000_000)
        done = torch.cuda.Event()
        done.record(compute)
    copied.synchronize()
    assert not done.query(), "a late copy waited for the step that it should overlap"
    torch.cuda.synchronize()


def test_rates_are_measured_and_memory_comes_back(setup):
    _, _, device, space = setup
    rates = space.measure()
    assert 1e6 < rates.out < 1e12
    assert 1e6 < rates.in_ < 1e12
    assert device._host.tensor.is_pinned()
    space.close()
    space.close()
    assert device._host.tensor.numel() == 0
    torch.cuda.synchronize()

"""The cache write and the block moves on a GPU: natively, and as sm_75 with TRITON_OVERRIDE_ARCH=sm75."""

import pytest
import torch
import triton
from kv_cache_cases import BF16, FLOAT, HALF, Case, disagreement, make, pool_for

from qengine.kernels.paged_attn.blocks import copy_blocks, gather_blocks, run_move, scatter_blocks
from qengine.kernels.paged_attn.cache import BlockLayout, KVPool, gather_kv
from qengine.kernels.paged_attn.write import WriteLaunch, run_write, write_kv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TURING = triton.knobs.runtime.override_arch == "sm75" or (
    torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 5)
)
KINDS = ["float16", "int8", "int4"] if TURING else ["float16", "bfloat16", "int8", "int4", "fp8"]
DTYPES = [HALF, FLOAT] if TURING else [HALF, BF16, FLOAT]
DIMS = [64, 80, 96, 112, 128, 192, 256]

TURNING = [
    (1, False, "rms"),
    (2, False, "layer"),
    (2, True, None),
    (1, True, "rms"),
    (4, False, None),
    (1, False, None),
]
CASES = [
    *[
        Case(k, d, (6, 2), 37, rotary=d // part // 2 * 2, interleaved=pairs, norm=norm, angles=HALF)
        for i, k in enumerate(KINDS)
        for j, d in enumerate(DIMS)
        for part, pairs, norm in [TURNING[(i + j) % len(TURNING)]]
    ],
    *[Case(k, 128, (28, 4), t, rotary=128, angles=HALF, block_size=64) for k in KINDS for t in (1, 64, 1000)],
    *[Case(k, 64, (9, 3), 130, dtype=d, rotary=48) for k in KINDS for d in DTYPES[1:]],
    *[Case("int4", d, (6, 2), 37, rotary=d, norm="rms", angles=HALF, offsets=2) for d in DIMS],
    *[Case("int4", 128, (28, 4), t, rotary=128, angles=HALF, block_size=64, offsets=2) for t in (1, 64, 1000)],
    *[Case("int4", 64, (9, 3), 130, dtype=d, rotary=48, offsets=2) for d in DTYPES[1:]],
    *[Case("int8", 128, (8, 8), 17, block_size=b, padding=False) for b in (8, 128, 1024)],
    Case("int8", 24, (5, 5), 19, rotary=8, norm="rms", weights=HALF),
    Case("float16", 40, (5, 1), 19, rotary=40),
]
LAUNCHES = [WriteLaunch(t, h, w) for t, h, w in ((1, 1, 1), (2, 8, 4), (8, 4, 8), (16, 1, 4))]
ORDER = ("num_heads", "head_norm", "norm_kind", "norm_eps", "cos", "sin", "interleaved")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_write_agrees_with_its_reference(case: Case) -> None:
    assert disagreement(case, lambda x, cache, slots, options: write_kv(x, cache, slots, **options), "cuda") is None


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_launch_agrees(launch: WriteLaunch, kind: str) -> None:
    def write(qkv, cache, slots, options):
        run_write(launch, qkv, cache, slots, *(options[name] for name in ORDER))

    assert disagreement(Case(kind, 128, (6, 3), 37, rotary=96, norm="rms"), write, "cuda") is None


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_stay_in_their_token(kind: str) -> None:
    case = Case(kind, 96, (2, 2), 40, rotary=96, padding=False)
    good, bad = make(case).to("cuda"), None
    bad = good.to("cuda")
    for row, value in ((3, float("nan")), (17, float("inf")), (29, float("-inf"))):
        bad.qkv[row, torch.randint(0, bad.qkv.shape[1], (60,), device="cuda")] = value
        bad.qkv[row, 2 * 96 : 3 * 96] = value  # a key head
        bad.qkv[row, 5 * 96 :] = value  # a value head
    kept = []
    for inputs in (good, bad):
        pool = pool_for(case, "cuda")
        write_kv(inputs.qkv, pool.layer(1), inputs.slots, **inputs.options)
        k, v = gather_kv(pool.layer(1), torch.arange(pool.num_blocks), pool.num_blocks * 16)
        kept.append((inputs.qkv, k[inputs.slots], v[inputs.slots]))
    clean = [i for i in range(40) if i not in (3, 17, 29)]
    for mine, other in zip(*kept, strict=True):
        assert torch.equal(mine[clean], other[clean])
    for row in (3, 17, 29):
        assert not kept[1][1][row, 0].isfinite().any() or kind in ("float16", "bfloat16")
        assert not kept[1][2][row, 1].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_gives_the_eager_bytes(kind: str) -> None:
    case = Case(kind, 128, (8, 2), 16, rotary=128, padding=False)
    static, pool, eager = make(case).to("cuda"), pool_for(case, "cuda"), pool_for(case, "cuda")
    cache = pool.layer(1)
    write_kv(static.to("cuda").qkv, cache, static.slots, **static.options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            write_kv(static.qkv, cache, static.slots, **static.options)
        for count in (16, 9, 1):
            fresh = make(case).to("cuda")
            static.qkv.copy_(fresh.qkv)
            fresh.slots[count:] = -1
            static.slots.copy_(fresh.slots)
            for p in (pool, eager):
                p.storage.fill_(0x5A)
            graph.replay()
            write_kv(fresh.qkv, eager.layer(1), fresh.slots, **static.options)
            assert torch.equal(static.qkv, fresh.qkv)
            assert torch.equal(pool.storage, eager.storage)
    stream.synchronize()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kind", ["float16", "int4"])
def test_blocks_travel_to_a_buffer_and_back(kind: str, host: bool) -> None:
    pool = KVPool.allocate(BlockLayout(kind, 3, 80, 16), 5, 40, "cuda")
    pool.storage.random_(0, 256)
    before = pool.storage.clone()
    ids = torch.randperm(40, device="cuda")[:23]
    shape = (23, 5, pool.layout.block_bytes)
    buffer = torch.full(shape, 7, dtype=torch.uint8, device="cpu" if host else "cuda")
    buffer = buffer.pin_memory() if host else buffer
    gather_blocks(pool, ids, buffer)
    torch.cuda.synchronize()
    assert torch.equal(buffer.cuda(), before[:, ids].transpose(0, 1))
    assert torch.equal(pool.storage, before)
    onto = torch.randperm(40, device="cuda")[:23]
    scatter_blocks(pool, onto, buffer)
    torch.cuda.synchronize()
    want = before.clone()
    want[:, onto] = before[:, ids]
    assert torch.equal(pool.storage, want)


def test_copies_read_every_source_first() -> None:
    for layers, blocks in ((3, 30), (40, 30)):
        pool = KVPool.allocate(BlockLayout("float16", 4, 128, 64), layers, blocks, "cuda")
        pool.storage.random_(0, 256)
        before = pool.storage.clone()
        # a chain, a swap and a fan-out
        pairs = torch.tensor([[0, 1], [1, 2], [2, 3], [7, 8], [8, 7], [9, 10], [9, 11], [9, 12]], device="cuda")
        copy_blocks(pool, pairs)
        want = before.clone()
        want[:, pairs[:, 1]] = before[:, pairs[:, 0]]
        assert torch.equal(pool.storage, want)


@pytest.mark.parametrize("chunk", [64, 1024, 8192])
def test_moves_of_any_chunk(chunk: int) -> None:
    pool = KVPool.allocate(BlockLayout("int8", 1, 40, 8), 3, 9, "cuda")
    pool.storage.random_(0, 256)
    ids = torch.randperm(9, device="cuda")[:5]
    buffer = torch.zeros(5, 3, pool.layout.block_bytes, dtype=torch.uint8, device="cuda")
    run_move(pool, ids, buffer, gather=True, chunk=chunk, programs=2)
    assert torch.equal(buffer, pool.storage[:, ids].transpose(0, 1))


@pytest.mark.skipif(TURING, reason="the point is the capability that is there")
def test_memory_that_a_kernel_cannot_reach_is_refused() -> None:
    pool = KVPool.allocate(BlockLayout("int8", 1, 64, 16), 2, 4, "cuda")
    ids = torch.arange(2, device="cuda")
    with pytest.raises(ValueError, match="pinned"):
        gather_blocks(pool, ids, torch.empty(2, 2, pool.layout.block_bytes, dtype=torch.uint8))

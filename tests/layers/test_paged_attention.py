"""The paged reference, and the dense context, against attention written out in float64."""

import pytest
import torch

from qengine.kernels.paged_attn import ref
from qengine.layers.attention import DenseContext, KVCache, PagedBatch, PagedContext


class Shape:
    num_layers, num_kv_heads, head_dim = 1, 2, 12


def truth(q, k, v, scale, softcap, window):
    """One sequence: q [T, Hq, D] are the last of the positions of k, v [L, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,jhd->htj", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(k.shape[0])
    own = place[-q.shape[0] :, None]
    seen = place <= own
    if window is not None:
        seen &= place > own - window
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("htj,jhd->thd", scores.softmax(-1), v)


OPTIONS = [
    {"scale": 0.3, "softcap": None, "sliding_window": None},
    {"scale": 0.3, "softcap": None, "sliding_window": 5},
    {"scale": 1.7, "softcap": 2.5, "sliding_window": None},
    {"scale": 1.7, "softcap": 2.5, "sliding_window": 9},
    {"scale": 0.3, "softcap": None, "sliding_window": 1},
]


def paged(contexts, queries, options, block_size=4, contiguous=False):
    """(ours, expected) for sequences of the given cached and new lengths, in a cache filled with rubbish."""
    sizes = [c + n for c, n in zip(contexts, queries, strict=True)]
    blocks = [-(-size // block_size) for size in sizes]
    order = list(range(sum(blocks) + 2))
    if not contiguous:
        order = torch.randperm(len(order)).tolist()
    cache = KVCache.allocate(Shape, len(order), block_size, torch.float32, "cpu")
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(float("nan"))
    tables = [[order.pop(0) for _ in range(count)] for count in blocks]
    widest = max(blocks)
    table = torch.tensor([row + [0] * (widest - len(row)) for row in tables], dtype=torch.int32)
    k, v = ([torch.randn(size, 2, 12) for size in sizes] for _ in range(2))
    q = [torch.randn(count, 6, 12) for count in queries]

    def slots(row, start, stop):
        return [tables[row][p // block_size] * block_size + p % block_size for p in range(start, stop)]

    for row, context in enumerate(contexts):
        if context:
            old = torch.tensor(slots(row, 0, context))
            ref.write_cache(k[row][:context], v[row][:context], cache.k[0], cache.v[0], old)
    new = torch.tensor([s for row, c in enumerate(contexts) for s in slots(row, c, sizes[row])])
    batch = PagedBatch(queries, contexts, table, new)
    fresh_k, fresh_v = (torch.cat([x[c:] for x, c in zip(xs, contexts, strict=True)]) for xs in (k, v))
    ours = PagedContext(cache, batch).attend(0, torch.cat(q), fresh_k, fresh_v, **options)
    names = {"scale": options["scale"], "softcap": options["softcap"], "window": options["sliding_window"]}
    return ours, torch.cat([truth(*x, **names) for x in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("contexts", "queries"),
    [
        ([0], [7]),
        ([0], [1]),
        ([13], [1]),
        ([5, 17, 8], [1, 1, 1]),
        ([1, 40, 3, 39, 9], [1, 1, 1, 1, 1]),
        ([0, 6, 11, 2], [9, 1, 5, 1]),
        ([3, 0, 30], [1, 4, 1]),
    ],
)
def test_mixed_steps(contexts, queries, options):
    ours, expected = paged(contexts, queries, options)
    assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_that_follow_each_other(options):
    for context in (0, 3, 4, 21):
        ours, expected = paged([context], [1], options, contiguous=True)
        assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_prompts_longer_than_a_chunk_of_queries(options, monkeypatch):
    monkeypatch.setattr(ref, "QUERY_CHUNK", 8)
    for contexts, queries in (([0], [30]), ([5, 13], [19, 8])):
        ours, expected = paged(contexts, queries, options)
        assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_dense_context(options):
    batch, length = 3, 11
    q, k, v = torch.randn(33, 6, 12), torch.randn(33, 2, 12), torch.randn(33, 2, 12)
    ours = DenseContext(batch, length).attend(0, q, k, v, **options)
    rest = (options["scale"], options["softcap"], options["sliding_window"])
    parts = [tuple(x[i : i + length] for x in (q, k, v)) for i in range(0, 33, length)]
    expected = torch.cat([truth(*part, *rest) for part in parts])
    assert (ours - expected).abs().max() < 1e-5


def test_bytes_per_block_are_those_of_the_tensors():
    cache = KVCache.allocate(Shape, 5, 4, torch.float16, "cpu")
    total = sum(x.nbytes for x in (*cache.k, *cache.v))
    assert KVCache.bytes_per_block(Shape, 4, torch.float16) * 5 == total
    assert cache.block_size == 4

"""A step padded to a graph's shape attends as one whose arrays have its own sizes: by the references, and on a GPU."""

import pytest
import torch

from qengine.engine.cuda_graphs import MixedShapes
from qengine.engine.device_inputs import DeviceInputs, InputShape, InputStaging
from qengine.engine.step import StepItem
from qengine.kernels.paged_attn.cache import BlockLayout, KVPool
from qengine.layers.attention import AttentionShape
from qengine.layers.attention_device import DeviceBatch, DeviceContext, pool_layers

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=64, scale=0.125)
SIZE = 16


def attend(layers, device, items, shape, qkv):
    """out [T, 256] of the items' tokens, in the items' order where single tokens come first."""
    items = sorted(items, key=lambda item: item.end - item.start > 1)
    tokens, singles = len(qkv), sum(item.end - item.start == 1 for item in items)
    shape = shape or InputShape(tokens, len(items), len(items) - singles, 8)
    host = torch.zeros(shape.offsets()[-1], dtype=torch.uint8)
    InputStaging(torch.device("cpu"), SIZE)._fill(items, DeviceInputs.over(host, shape), {})
    inputs = DeviceInputs.over(host.to(device), shape)
    rows = torch.zeros(shape.tokens, 512, dtype=torch.float16, device=device)
    rows[:tokens] = qkv.to(device)
    batch = DeviceBatch(
        inputs.tables,
        inputs.seq_lens,
        inputs.slots,
        shape.sequences - shape.prefills,
        max_seq_len=128,
        query_starts=inputs.query_starts if shape.prefills else None,
        max_query_len=shape.tokens,
        lengths=inputs.lengths,
    )
    return DeviceContext(layers, batch).attend_joined(0, rows, None, SHAPE)[:tokens].float().cpu()


def run(device, kind, items, shape, qkv, earlier):
    """The step's output on a pool to which the sequences' earlier tokens are written first."""
    pool = KVPool.allocate(BlockLayout(kind, 2, 64, SIZE), 1, 64, torch.device(device))
    pool.storage.fill_(0x7E)  # NaN in float16: what is never written must never matter
    layers = pool_layers(pool)
    before = [StepItem(item.seq_id, item.token_ids, 0, item.start, item.block_table) for item in items if item.start]
    attend(layers, device, before, None, earlier)
    return attend(layers, device, items, shape, qkv)


def step(singles, prefills):
    """Items with (earlier tokens, new tokens) each, on blocks dealt out from the end."""
    items, block = [], 64
    for seq_id, (context, count) in enumerate([(context, 1) for context in singles] + prefills):
        need = -(-(context + count) // SIZE)
        items.append(
            StepItem(seq_id, [1] * (context + count), context, context + count, list(range(block - need, block)))
        )
        block -= need
    return items


STEPS = [
    ([40, 3, 90], [(1, 30), (17, 2)]),
    ([], [(5, 60)]),
    ([1] * 20, [(1, 9)]),
    ([7, 50], []),
]


def check(device, kind, singles, prefills, tolerance):
    torch.manual_seed(0)
    items = step(singles, prefills)
    tokens, context = (sum(values) for values in zip(*((i.end - i.start, i.start) for i in items), strict=True))
    qkv, earlier = torch.randn(tokens, 512), torch.randn(context, 512)
    exact = run(device, kind, items, None, qkv, earlier)
    padded = run(device, kind, items, MixedShapes(40, 256, 8).of(tokens, len(singles), len(prefills)), qkv, earlier)
    assert exact.isfinite().all()
    assert (padded - exact).abs().max() <= tolerance, "a graph's padding must not change what a step computes"
    assert exact.abs().mean() > 0.01


@pytest.mark.parametrize(("singles", "prefills"), STEPS)
def test_padding_changes_nothing(singles, prefills):
    check("cpu", "float16", singles, prefills, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
@pytest.mark.parametrize(("singles", "prefills"), STEPS)
def test_padding_changes_nothing_on_a_gpu(singles, prefills, kind):
    check("cuda", kind, singles, prefills, 2e-3)

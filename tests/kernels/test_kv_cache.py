"""The paged cache's layout, its references, and the machine code of its write for cards that are not here."""

import pytest
import torch
from kv_cache_cases import FLOAT, Case, disagreement, make, pool_for

from qengine.kernels import sass
from qengine.kernels.paged_attn.blocks import copy_blocks, gather_blocks, scatter_blocks
from qengine.kernels.paged_attn.cache import (
    KINDS,
    BlockLayout,
    KVPool,
    dequantize,
    gather_kv,
    quantize,
    store_kv_ref,
)
from qengine.kernels.paged_attn.rotation import choose_axes, half_rotation, rotate_heads
from qengine.kernels.paged_attn.write import WriteLaunch, choose_write, write_kv, write_kv_ref
from qengine.kernels.paged_attn.write_aot import compile_write

DIMS = [64, 80, 96, 112, 128, 192, 256]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8, 40, 64, 80, 256])
def test_parts_of_a_block_are_aligned_and_do_not_overlap(kind, size):
    for heads, block in ((1, 8), (3, 16), (8, 1024)):
        layout = BlockLayout(kind, heads, size, block, 1)
        at = 0
        for start, nbytes in layout.parts:
            assert start % 16 == 0
            assert start >= at
            at = start + nbytes
        assert layout.block_bytes >= at
        assert layout.block_bytes % 16 == 0
        values = {"float16": 16, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4}[kind] * size
        scales = {"float16": 0, "bfloat16": 0, "int8": 16, "fp8": 16, "int4": 32}[kind]
        exact = 2 * heads * block * (values + scales) // 8
        assert exact <= layout.block_bytes < exact + 64
        assert KVPool.bytes_per_block(5, layout) == 5 * layout.block_bytes
        if kind == "int4":
            more = BlockLayout(kind, heads, size, block).block_bytes - layout.block_bytes
            assert abs(more - 4 * heads * block) <= 16


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_layer_belongs_to_one_view(kind):
    pool = KVPool.allocate(BlockLayout(kind, 3, 40, 8), 3, 5, "cpu")
    cache = pool.layer(1)
    for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if tensor is not None:
            tensor.view(torch.uint8).add_(1)
            assert tensor.shape[:3] == (5, 3, 8)
            assert tensor.data_ptr() % 16 == 0
    assert pool.storage[0].sum() == 0
    assert pool.storage[2].sum() == 0
    assert pool.storage[1].max() == 1
    padding = pool.layout.block_bytes - sum(nbytes for _, nbytes in pool.layout.parts)
    assert (pool.storage[1] == 0).sum() == 5 * padding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3", 1, 64, 16), "kind='int3'"),
        (("int8", 1, 64, 24), "block_size=24, must be a power of two"),
        (("int8", 1, 64, 2048), "block_size=2048"),
        (("int8", 1, 60, 16), "head_dim=60"),
        (("int8", 0, 64, 16), "kv_heads=0"),
        (("int4", 1, 64, 16, 3), "key_offsets=3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout(*arguments)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_values_are_the_nearest_that_can_be_held(kind):
    x = torch.randn(200, 3, 96) * torch.logspace(-4, 3, 200)[:, None, None] + torch.randn(200, 3, 1)
    values, scales = quantize(x, kind)
    held = dequantize(values, scales, kind)
    if kind == "fp8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        grid = codes[codes.isfinite()] * scales.float()[..., None]
    elif kind == "int8":
        grid = torch.arange(-127, 128) * scales.float()[..., None]
    else:
        grid = torch.arange(16) * scales[..., :1].float() + scales[..., 1:].float()
    best = (x[..., None] - grid[..., None, :]).abs().amin(-1)
    wrong = (x - held).abs()
    assert (wrong <= best * (1 + 1e-5) + 1e-7 * x.abs()).all()
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) if kind == "int4" else x.abs().amax(-1, keepdim=True)
    # an offset far larger than the spread is itself rounded, as a float16 cache would round the values, and the scales
    # of tiny values are float16's subnormal numbers, 6e-8 apart
    limit = {"int8": 0.0041, "int4": 0.036, "fp8": 0.036}[kind] * spread + 6e-4 * x.abs() + 448 * 3e-8
    assert (wrong <= limit).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_values_that_are_not_finite(kind):
    x = torch.randn(5, 2, 64)
    x[0] = 0
    x[1, 0, 5] = float("inf")
    x[2, 1, 7] = float("nan")
    x[3, 0] = 5e-8
    held = dequantize(*quantize(x, kind), kind)
    assert (held[0] == 0).all()
    assert held[3].isfinite().all()
    assert not held[1, 0, 5].isfinite()
    assert held[2, 1, 7].isnan()
    assert held[1, 1].isfinite().all()
    assert held[2, 0].isfinite().all()
    huge = torch.full((1, 64), 3e38)
    assert not dequantize(*quantize(huge, kind), kind).isnan().any()


def test_a_key_with_two_offsets_keeps_the_mean_of_its_halves():
    x = torch.randn(300, 2, 80) * torch.logspace(-3, 2, 300)[:, None, None]
    x[..., :40] += torch.randn(300, 2, 1) * 50
    values, scales = quantize(x, "int4", 2)
    held = dequantize(values, scales, "int4")
    assert scales.shape == (300, 2, 4)
    means = [part.unflatten(-1, (2, -1)).mean(-1) for part in (held, x)]
    # float16 offsets, and a sum of codes that is exact
    assert ((means[0] - means[1]).abs() <= 6e-4 * (scales[..., 1:3].abs() + 1e-4)).all()
    spread = (x.unflatten(-1, (2, -1)).amax(-1) - x.unflatten(-1, (2, -1)).amin(-1)).amax(-1)[..., None]
    assert ((held - x).abs() <= spread * (0.5 / 15 + 0.035) + 1e-3 * x.abs()).all()
    assert (held - x).abs().mean() < 0.022 * spread.mean()
    assert ((values & 15).amax() == 15) & ((values >> 4).amin() == 0)


@pytest.mark.parametrize("size", DIMS)
def test_the_rotation_is_orthonormal_and_takes_the_axis_to_the_mean(size):
    half = size // 2
    for axis in (0, 1, half // 3, half - 1):
        matrix = half_rotation(size, axis).double()
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(half, dtype=torch.double), rtol=0, atol=1e-6)
        torch.testing.assert_close(matrix[axis], torch.full((half,), half**-0.5, dtype=torch.double), rtol=0, atol=1e-6)
    axes = torch.tensor([3, half - 2], dtype=torch.int32)
    x = torch.randn(5, 6, size)
    turned = rotate_heads(x, axes)
    for head in range(6):
        for part in (0, half):
            want = x[:, head, part : part + half] @ half_rotation(size, int(axes[head // 3]))
            torch.testing.assert_close(turned[:, head, part : part + half], want)
    with pytest.raises(ValueError, match="outside half a head"):
        half_rotation(size, half)


def test_the_axis_is_the_pair_with_the_most_energy():
    energy = torch.rand(3, 2, 16)
    energy[1, 0, 5], energy[1, 0, 13], energy[1, 0, 2] = 3.0, 3.0, 5.0
    axes = choose_axes(energy)
    assert axes.shape == (3, 2)
    assert axes.dtype == torch.int32
    assert axes[1, 0] == 5


def test_an_axis_that_holds_the_energy_makes_keys_more_exact():
    """Heads as models have them: one pair far larger than the rest."""
    x = torch.randn(400, 1, 64)
    x[..., [9, 41]] = x[..., [9, 41]] + torch.tensor([20.0, -15.0])
    errors = []
    for axis, offsets in ((9, 2), (0, 2), (9, 1)):
        turned = rotate_heads(x, torch.tensor([axis], dtype=torch.int32))
        held = dequantize(*quantize(turned, "int4", offsets), "int4")
        errors.append((held - turned).square().mean().item())
    assert errors[0] * 5 < min(errors[1:])
    exact = torch.tensor([9])
    back = rotate_heads(x, exact)  # the pair itself is held as exactly as float16 holds it
    held = dequantize(*quantize(back, "int4", 2), "int4")
    pair = held.unflatten(-1, (2, -1)).mean(-1) * 32**0.5
    assert (pair - x[..., [9, 41]]).abs().max() < 0.02


@pytest.mark.parametrize(("kind", "offsets"), [*((kind, 1) for kind in KINDS), ("int4", 2)])
def test_tokens_come_back_from_their_blocks(kind, offsets):
    pool = KVPool.allocate(BlockLayout(kind, 2, 32, 8, offsets), 2, 9, "cpu", rotate=False)
    cache = pool.layer(1)
    k, v = torch.randn(2, 21, 2, 32).unbind()
    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    slots = (table[:3, None].long() * 8 + torch.arange(8)).flatten()[:21]
    slots[11] = -1
    store_kv_ref(k, v, cache, slots)
    for length in (1, 8, 21):
        got_k, got_v = gather_kv(cache, table, length)
        for got, x, count in ((got_k, k, offsets), (got_v, v, 1)):
            want = dequantize(*quantize(x, kind, count), kind)[:length]
            want[11:12] = 0
            assert torch.equal(got, want)
    assert pool.storage[0].sum() == 0


def test_rotating_leaves_the_scores_as_they_are():
    case = Case("int4", 96, (2, 2), 12, rotary=96, norm="rms", dtype=FLOAT, padding=False, offsets=2)
    inputs, pool = make(case), pool_for(case)
    plain = KVPool.allocate(pool.layout, 2, pool.num_blocks, "cpu", rotate=False)
    scores = []
    for p in (pool, plain):
        copy = inputs.to("cpu")
        write_kv_ref(copy.qkv, p.layer(1), copy.slots, **copy.options)
        assert p.layer(1).rotate == (p is pool)
        q = copy.qkv[:, :192].view(12, 2, 96)
        k, _ = gather_kv(p.layer(1), torch.arange(p.num_blocks), p.num_blocks * 16)
        scores.append(torch.einsum("thd,shd->hts", q, k[copy.slots]))
    error = (scores[0] - scores[1]).norm() / scores[1].norm()
    assert error < 0.5, "4 bits are coarse, but these are other scores"
    with pytest.raises(ValueError, match="rotate is for kind='int4'"):
        KVPool.allocate(BlockLayout("int8", 1, 64, 16), 1, 1, "cpu", rotate=True)


def test_cpu_tensors_are_served_by_the_reference():
    for kind in KINDS:
        case = Case(kind, 64, (3, 1), 40, rotary=32, norm="layer", block_size=8)
        assert disagreement(case, lambda x, cache, slots, options: write_kv(x, cache, slots, **options)) is None


def refused(message, **changes):
    case = Case("int8", 64, changes.pop("heads", (3, 1)), 6, rotary=64, norm="rms")
    inputs, cache = make(case), pool_for(case).layer(0)
    qkv, slots = changes.pop("qkv", inputs.qkv), changes.pop("slots", inputs.slots)
    with pytest.raises(ValueError, match=message):
        write_kv(qkv, cache, slots, **{**inputs.options, **changes})


def test_arguments_that_do_not_fit_are_refused():
    refused(r"qkv must be \[tokens, 320\]", qkv=torch.zeros(6, 321))
    refused("qkv must be", qkv=torch.zeros(6, 320, dtype=torch.float64))
    refused("qkv must be", qkv=torch.zeros(320, 6).t())
    refused("num_heads=3 must be a multiple", heads=(3, 2))
    refused(r"slots must be int64 \[6\]", slots=torch.zeros(5, dtype=torch.int64))
    refused(r"slots must be int64 \[6\]", slots=torch.zeros(6, dtype=torch.int32))
    refused("norm_kind='batch'", norm_kind="batch")
    refused(r"head_norm must be contiguous \[4, 64\]", head_norm=torch.zeros(4, 32))
    refused("cos and sin come together", sin=None)
    refused("cos must be", cos=torch.zeros(6, 1, 66), sin=torch.zeros(6, 1, 66))
    refused("differ", cos=torch.zeros(6, 1, 32))
    refused("slots on meta", slots=torch.zeros(6, dtype=torch.int64, device="meta"))


def test_blocks_move_on_the_cpu():
    pool = KVPool.allocate(BlockLayout("int4", 3, 80, 16), 5, 12, "cpu")
    pool.storage.random_(0, 256)
    before, ids = pool.storage.clone(), torch.randperm(12)[:7]
    buffer = torch.zeros(7, 5, pool.layout.block_bytes, dtype=torch.uint8)
    gather_blocks(pool, ids, buffer)
    assert torch.equal(buffer[3, 2], before[2, ids[3]])
    scatter_blocks(pool, ids.flip(0).contiguous(), buffer)
    assert torch.equal(pool.storage[:, ids.flip(0)], before[:, ids])
    pool.storage.copy_(before)
    copy_blocks(pool, torch.tensor([[0, 1], [1, 0], [1, 2]]))
    assert torch.equal(pool.storage[:, :3], before[:, [1, 0, 1]])
    copy_blocks(pool, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"block_ids must be int64 \[n\]"):
        gather_blocks(pool, ids.int(), buffer)
    with pytest.raises(ValueError, match=r"buffer must be contiguous uint8 \[6, 5"):
        gather_blocks(pool, ids[:6], buffer)
    with pytest.raises(ValueError, match=r"pairs must be int64 \[n, 2\]"):
        copy_blocks(pool, torch.zeros(3, dtype=torch.int64))


def test_launches_fit_the_step():
    cache = KVPool.allocate(BlockLayout("int8", 4, 128, 16), 1, 2, "cpu").layer(0)
    for tokens in (1, 7, 256, 8192):
        launch = choose_write(tokens, 28, cache)
        for number in (launch.tokens, launch.heads, launch.warps):
            assert number & (number - 1) == 0
        assert 1 <= launch.warps <= 8
    assert choose_write(1, 28, cache).tokens == 1


@pytest.mark.parametrize("size", DIMS)
def test_machine_code_for_turing_has_no_stack_and_wide_accesses(size):
    kind = {64: "int4", 80: "int8", 96: "float16", 112: "int4", 128: "int4", 192: "int8", 256: "int4"}[size]
    cache = KVPool.allocate(BlockLayout(kind, 2, size, 16), 1, 2, "cpu").layer(0)
    launch = choose_write(4096, 8, cache)
    kernel = compile_write(launch, 75, kind, (8, 2), size, norm="rms", key_offsets=2)
    code = sass.read(kernel.asm["cubin"])
    assert code.stack == 0
    assert kernel.metadata.shared <= 48 * 1024
    assert code.registers <= 168
    assert "LDG.E.128" in sass.disassemble(kernel.asm["cubin"])


@pytest.mark.parametrize(("sm", "kind", "dtype"), [(80, "bfloat16", "bf16"), (90, "fp8", "fp16"), (90, "int4", "bf16")])
def test_machine_code_for_later_cards_has_no_stack(sm, kind, dtype):
    kernel = compile_write(
        WriteLaunch(2, 4, 2), sm, kind, (8, 2), 128, rotary_dim=64, norm="layer", key_offsets=2, dtype=dtype
    )
    assert sass.read(kernel.asm["cubin"]).stack == 0

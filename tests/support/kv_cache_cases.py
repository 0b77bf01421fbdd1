"""Cases of the cache write, and how far it may be from its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool, LayerCache, gather_kv
from qengine.kernels.paged_attn.write import write_kv_ref

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
POISON, OTHER_POISON = 0x5A, 0xA5


@dataclass(frozen=True)
class Case:
    """heads: (Hq, Hkv). rotary: dimensions that turn, 0 for none. norm: None, "rms" or "layer"."""

    kind: Kind
    head_dim: int
    heads: tuple[int, int] = (4, 2)
    tokens: int = 5
    rotary: int = 0
    interleaved: bool = False
    norm: str | None = None
    dtype: torch.dtype = HALF
    angles: torch.dtype = FLOAT
    weights: torch.dtype = FLOAT
    block_size: int = 16
    padding: bool = True
    offsets: int = 1

    def __str__(self) -> str:
        turning = f"r{self.rotary}{'i' if self.interleaved else ''}-{self.norm}"
        return (
            f"{self.kind}-{self.head_dim}-{self.heads}-{self.tokens}-{turning}-{str(self.dtype)[6:]}-{self.block_size}"
        )


@dataclass
class Inputs:
    """What write_kv takes, as keyword arguments in `options`; qkv is a view of a wider tensor, `joined`."""

    joined: torch.Tensor
    qkv: torch.Tensor
    slots: torch.Tensor
    options: dict[str, object]

    def to(self, device: str) -> Inputs:
        """Copies on a device."""
        joined = self.joined.to(device, copy=True)
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return Inputs(joined, joined[:, : self.qkv.shape[1]], self.slots.to(device), moved)


def make(case: Case) -> Inputs:
    """Random heads with outliers, a zero token, and slots in any order, some of them padding."""
    width = (case.heads[0] + 2 * case.heads[1]) * case.head_dim
    joined = torch.randn(case.tokens, width + 16)
    joined[:, ::7] *= 5
    if case.tokens > 1:
        joined[case.tokens // 3] = 0
    joined = joined.to(case.dtype)
    blocks = -(-case.tokens // case.block_size) + 3
    slots = torch.randperm(blocks * case.block_size)[: case.tokens]
    if case.padding and case.tokens > 1:
        slots[torch.rand(case.tokens) < 0.2] = -1
        slots[case.tokens // 2] = -1
    angles = torch.rand(case.tokens, 1, case.rotary // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    if case.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    options: dict[str, object] = {
        "num_heads": case.heads[0],
        "head_norm": None if case.norm is None else torch.randn(sum(case.heads), case.head_dim).to(case.weights),
        "norm_kind": case.norm or "rms",
        "norm_eps": 1e-5,
        "cos": cos.to(case.angles) if case.rotary else None,
        "sin": sin.to(case.angles) if case.rotary else None,
        "interleaved": case.interleaved,
    }
    return Inputs(joined, joined[:, :width], slots, options)


def pool_for(case: Case, device: str = "cpu", poison: int = POISON) -> KVPool:
    """Two layers of blocks full of a poison byte."""
    layout = BlockLayout(case.kind, case.heads[1], case.head_dim, case.block_size, case.offsets)
    pool = KVPool.allocate(layout, 2, -(-case.tokens // case.block_size) + 3, device)
    pool.storage.fill_(poison)
    if pool.axes is not None:
        pool.axes.copy_(torch.tensor([[5 * (h + 1) % (case.head_dim // 2) for h in range(case.heads[1])]]))
    return pool


def disagreement(
    case: Case,
    write: Callable[[torch.Tensor, LayerCache, torch.Tensor, dict[str, object]], None],
    device: str = "cpu",
    coarse: bool = False,
) -> str | None:
    """What is wrong with `write` on a case, or None. coarse: allow for the interpreter's cut-off bfloat16 and fp8."""
    inputs = make(case)
    pools = [pool_for(case), pool_for(case, poison=OTHER_POISON)]
    for pool in pools:
        copy = inputs.to("cpu")
        write_kv_ref(copy.qkv, pool.layer(1), copy.slots, **copy.options)  # type: ignore[arg-type]
    own, own_pool = inputs.to(device), pool_for(case, device)
    write(own.qkv, own_pool.layer(1), own.slots, own.options)
    got, got_pool = own.to("cpu"), KVPool(own_pool.storage.cpu(), own_pool.layout, own_pool.rotate, pools[0].axes)
    untouched = (pools[0].storage == POISON) & (pools[1].storage == OTHER_POISON)
    if not (got_pool.storage[untouched] == POISON).all():
        return "wrote to places of the pool that are not its own"
    queries = case.heads[0] * case.head_dim
    if not torch.equal(got.joined[:, queries:], inputs.joined[:, queries:]):
        return "changed k, v or what lies beyond the row"
    rounding = {HALF: 2**-10, BF16: 2**-7, FLOAT: 2e-6}[case.dtype] * (2 if coarse else 1)
    wrong = (got.qkv[:, :queries].float() - copy.qkv[:, :queries].float()).abs()
    # sums over a head are as exact as its largest element
    size = copy.qkv[:, :queries].float().abs().unflatten(1, (case.heads[0], -1)).amax(-1, keepdim=True)
    small = (size * 2e-6).expand(-1, -1, case.head_dim).flatten(1)
    limit = copy.qkv[:, :queries].float().abs() * rounding + small + 2e-3 * rounding
    if not (wrong <= limit).all():
        return f"q is off by {(wrong - limit).max().item():.2e} more than rounding"
    return _stored(case, got_pool.layer(1), pools[0].layer(1), inputs.slots, coarse)


def _stored(case: Case, got: LayerCache, want: LayerCache, slots: torch.Tensor, coarse: bool) -> str | None:
    blocks = torch.arange(got.num_blocks)
    kept = slots[slots >= 0]
    ours, theirs = ([x[kept] for x in gather_kv(c, blocks, blocks.numel() * c.block_size)] for c in (got, want))
    steps = _steps(case, want, kept, coarse)
    for name, mine, other, step in zip("kv", ours, theirs, steps, strict=True):
        away = (mine - other).abs() / step
        # values that lie on the edge between two codes may fall to either side: keys, which are computed
        if away.max() > (2.05 if coarse else 1.05):
            return f"{name} is {away.max().item():.2f} steps from the reference"
        share = (away > 0.02).float().mean().item()
        if share > (1.0 if coarse else 0.01 if name == "k" else 0.0):
            return f"{name} differs from the reference in {share:.2%} of the values"
    return None


def _steps(case: Case, want: LayerCache, kept: torch.Tensor, coarse: bool) -> list[torch.Tensor]:
    """The distance between neighbouring values that the cache can hold, for k and for v [T, Hkv, D]."""
    found = []
    for values, scales in ((want.k, want.k_scale), (want.v, want.v_scale)):
        block, offset = kept // case.block_size, kept % case.block_size
        if scales is None:
            held = values[block, :, offset].float().abs()
            step = held * {"float16": 2**-10, "bfloat16": 2**-7}[case.kind] + 1e-6
        else:
            scale = scales[block, :, offset].float()
            step = (scale[..., 0] if case.kind == "int4" else scale)[..., None] + 1e-9
            if case.kind == "fp8":
                raw = values.view(torch.uint8)[block, :, offset].view(torch.float8_e4m3fn).float()
                step = step * (32.0 if coarse else (raw.abs() * 0.125).clamp(min=2**-9))
        found.append(step)
    return found

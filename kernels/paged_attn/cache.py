"""The paged key-value cache of a device: its layout in memory, and plain torch references to read and quantize it.

One allocation holds all layers, so that a block's bytes of a layer are one contiguous piece, and a swap moves whole
pieces. A block of a layer, each part starting at a multiple of 16 bytes:

    K [Hkv, BS, W] | V [Hkv, BS, W] | K scales | V scales | padding to a multiple of 16 bytes

W elements hold a head's D values of a token (one uint8 for two of them with int4). Quantized kinds have scales of
their own for each token and KV head:

    int8, fp8   x = q * scale              scale float16, the largest |x| / 127 or / 448
    int4        x = q * scale + offset     scale and offset float16, q in 0..15
                byte j = element j in the low nibble, element j + D/2 in the high nibble;
                keys have two offsets, one for each half of a head, or one (`key_offsets`)

A token whose values are not finite gets a NaN scale: it reads as NaN, as it would from a float16 cache, and no other
token is touched. Whoever reads a partly filled block must not let the places beyond a sequence's length count, not
even multiplied by zero: they hold whatever was there before.

int4 with `rotate`: keys (after their rotary embedding) and queries are multiplied by an orthonormal matrix, which
leaves the scores as they are (see rotation.py). It spreads outliers over the head, and takes one pair of elements of
each KV head, its axis, to where the two offsets hold it exactly: models keep most of their keys' energy in one pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Kind = Literal["float16", "bfloat16", "int8", "int4", "fp8"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
_SCALES: dict[str, int] = {"float16": 0, "bfloat16": 0, "int8": 1, "int4": 2, "fp8": 1}
"""float16 numbers for a token and head."""
_LARGEST: dict[str, float] = {"int8": 127.0, "fp8": 448.0}
_HALF_MAX = 65504.0
_ALIGN = 16


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of a block of one layer lie.

    kind: how values are held. kv_heads: Hkv. head_dim: D, a multiple of 8. block_size: tokens a block, a power of two
    from 8 to 1024. key_offsets: of an int4 key, 1 or 2; the second takes 4 bytes a key and halves what int4 costs in
    accuracy (benchmarks/kv_accuracy.py). Raises ValueError for anything else.
    """

    kind: Kind
    kv_heads: int
    head_dim: int
    block_size: int
    key_offsets: int = 2

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.kind not in KINDS:
            raise ValueError(f"kv cache: kind={self.kind!r}, must be one of {', '.join(KINDS)}")
        size = self.block_size
        if not 8 <= size <= 1024 or size & (size - 1):
            raise ValueError(f"kv cache: block_size={size}, must be a power of two from 8 to 1024")
        if self.head_dim < 8 or self.head_dim % 8:
            raise ValueError(f"kv cache: head_dim={self.head_dim}, must be a multiple of 8")
        if self.kv_heads < 1:
            raise ValueError(f"kv cache: kv_heads={self.kv_heads}, must be at least 1")
        if self.key_offsets not in (1, 2):
            raise ValueError(f"kv cache: key_offsets={self.key_offsets}, must be 1 or 2")

    @property
    def width(self) -> int:
        """W: elements of `dtype` that hold a head of a token."""
        return self.head_dim // 2 if self.kind == "int4" else self.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the K and V parts."""
        return _DTYPES[self.kind]

    @property
    def scales(self) -> tuple[int, int]:
        """float16 numbers for a key and for a value of a head: keys with two offsets have 4, the last unused."""
        count = _SCALES[self.kind]
        return (4 if self.kind == "int4" and self.key_offsets == 2 else count), count

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first byte, bytes) of K, V, K scales, V scales."""
        rows = self.kv_heads * self.block_size
        value = rows * self.width * self.dtype.itemsize
        k_scale, v_scale = (rows * 2 * count for count in self.scales)
        starts, at = [], 0
        for size in (value, value, k_scale, v_scale):
            starts.append((at, size))
            at += _aligned(size)
        return tuple(starts)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer, a multiple of 16."""
        start, size = self.parts[-1]
        return _aligned(start + size)


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a pool; the tensors are views of it.

    k, v: [NB, Hkv, BS, W], the last dimension contiguous. k_scale, v_scale: None for float16 and bfloat16; float16
    [NB, Hkv, BS] for int8 and fp8; float16 [NB, Hkv, BS, 2], (scale, offset), for int4, where k_scale may be
    [NB, Hkv, BS, 4], (scale, offset of the first half, of the second, unused). rotate: keys are held, and queries come,
    rotated, with the axes int32 [Hkv] (see rotation.py).
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    kind: Kind
    kv_heads: int
    head_dim: int
    block_size: int
    rotate: bool = False
    axes: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """NB."""
        return self.k.shape[0]

    @property
    def key_offsets(self) -> int:
        """Offsets of a key with int4, 1 or 2; 1 for other kinds."""
        return 2 if self.kind == "int4" and self.k_scale is not None and self.k_scale.shape[3] == 4 else 1


@dataclass(frozen=True)
class KVPool:
    """The cache of all layers. storage: uint8 [L, NB, block_bytes]. rotate: see LayerCache.

    axes: int32 [L, Hkv] where it rotates, zeros at first. Set them (rotation.py: `choose_axes`) before anything is
    written, and not again: keys that were rotated otherwise do not fit the queries.
    """

    storage: torch.Tensor
    layout: BlockLayout
    rotate: bool = False
    axes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Give a rotating pool its axes."""
        if self.rotate and self.layout.kind != "int4":
            raise ValueError(f"kv cache: rotate is for kind='int4', not {self.layout.kind!r}")
        if self.rotate and self.axes is None:
            shape = (self.storage.shape[0], self.layout.kv_heads)
            object.__setattr__(self, "axes", torch.zeros(shape, dtype=torch.int32, device=self.storage.device))

    @classmethod
    def allocate(
        cls,
        layout: BlockLayout,
        num_layers: int,
        num_blocks: int,
        device: torch.device | str,
        rotate: bool | None = None,
    ) -> KVPool:
        """An empty pool: zeros, so that whatever is read by mistake is finite.

        rotate: None takes what the kind's accuracy asks for, which is True for int4. Raises ValueError where it is
        True for another kind.
        """
        rotate = layout.kind == "int4" if rotate is None else rotate
        shape = (num_layers, num_blocks, layout.block_bytes)
        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), layout, rotate)

    @staticmethod
    def bytes_per_block(num_layers: int, layout: BlockLayout) -> int:
        """Bytes of one block over all layers, keys, values, scales and padding: what a block costs a planner."""
        return num_layers * layout.block_bytes

    @property
    def num_layers(self) -> int:
        """L."""
        return self.storage.shape[0]

    @property
    def num_blocks(self) -> int:
        """NB."""
        return self.storage.shape[1]

    def layer(self, index: int) -> LayerCache:
        """Views of layer `index`; make them once, not every step."""
        layout = self.layout
        rows = (self.num_blocks, layout.kv_heads, layout.block_size)
        k, v, k_scale, v_scale = (self.storage[index, :, at : at + size] for at, size in layout.parts)
        shape = (*rows, layout.width)
        k_rows, v_rows = ((*rows, count) if count > 1 else rows for count in layout.scales)
        scaled = _SCALES[layout.kind] > 0
        return LayerCache(
            k=k.view(layout.dtype).view(shape),
            v=v.view(layout.dtype).view(shape),
            k_scale=k_scale.view(torch.float16).view(k_rows) if scaled else None,
            v_scale=v_scale.view(torch.float16).view(v_rows) if scaled else None,
            kind=layout.kind,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            rotate=self.rotate,
            axes=None if self.axes is None else self.axes[index],
        )


def quantize(x: torch.Tensor, kind: Kind, offsets: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scales) of x [..., D] as a cache of `kind` holds them: [..., W] and None, float16 [...] or [..., 2].

    The codes are the nearest on the grid of the scales as stored, that is, rounded to float16. int4 with two offsets:
    scales are [..., 4], and each half keeps its mean instead.
    """
    if kind in ("float16", "bfloat16"):
        return x.to(_DTYPES[kind]), None
    x = x.float()
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    if kind == "int4":
        codes, scales = (_codes_of_halves if offsets == 2 else _codes)(x)
        first, second = codes.chunk(2, dim=-1)
        return first | (second << 4), torch.where(finite[..., None], scales, torch.nan)
    largest = _LARGEST[kind]
    scale = (x.abs().amax(-1) / largest).clamp(max=_HALF_MAX).half()
    scaled = (x * _inverse(scale)[..., None]).clamp(-largest, largest)
    values = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return values, torch.where(finite, scale, torch.nan)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., D] and float16 [..., 2] of finite x."""
    low, high = x.aminmax(dim=-1)
    offset = low.clamp(-_HALF_MAX, _HALF_MAX).half()
    scale = ((high - offset.float()) / 15.0).clamp(0.0, _HALF_MAX).half()
    codes = ((x - offset.float()[..., None]) * _inverse(scale)[..., None]).round().clamp(0, 15).to(torch.uint8)
    return codes, torch.stack((scale, offset), dim=-1)


def _codes_of_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., D] and float16 [..., 4] of finite x: a scale for all, an offset for each half.

    The codes lie in the middle of a half's values; the offset is then what gives the half its mean.
    """
    halves = x.unflatten(-1, (2, -1))
    low, high = halves.aminmax(dim=-1)
    scale = ((high - low).amax(-1) / 15.0).clamp(max=_HALF_MAX).half()
    wide = scale.float()[..., None]
    start = (low + high) * 0.5 - 7.5 * wide
    codes = ((halves - start[..., None]) * _inverse(scale)[..., None, None]).round().clamp(0, 15)
    offsets = (halves.mean(-1) - wide * codes.mean(-1)).clamp(-_HALF_MAX, _HALF_MAX).half()
    scales = torch.cat((scale[..., None], offsets, torch.zeros_like(scale)[..., None]), dim=-1)
    return codes.flatten(-2).to(torch.uint8), scales


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale in float32, and 0 for a scale of 0, whose values are all within half a step of 0."""
    scale = scale.float()
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def dequantize(values: torch.Tensor, scales: torch.Tensor | None, kind: Kind) -> torch.Tensor:
    """Float32 [..., D] of what `quantize` returns."""
    if kind == "int4":
        assert scales is not None, "int4 values come with scales and offsets"
        codes = torch.stack((values & 15, values >> 4), dim=-2).float()
        offsets = scales[..., 1:3].float()[..., None]  # one, or one for each half
        return (codes * scales[..., :1].float()[..., None] + offsets).flatten(-2)
    wide = values.float()
    return wide if scales is None else wide * scales.float()[..., None]


def store_kv_ref(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """Write finished k and v [T, Hkv, D] to int64 slots [T] (block * BS + offset; negative: not written).

    Keys are held as they come: rotating them is the caller's (`write_kv_ref` does it).
    """
    kept = slots >= 0
    place = slots[kept]
    block, offset = place // cache.block_size, place % cache.block_size
    for x, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        offsets = 2 if scales is not None and scales.shape[-1] == 4 and cache.kind == "int4" else 1
        new_values, new_scales = quantize(x[kept], cache.kind, offsets)
        values.view(torch.uint8)[block, :, offset] = new_values.view(torch.uint8)
        if scales is not None and new_scales is not None:
            scales[block, :, offset] = new_scales


def gather_kv(cache: LayerCache, block_table_row: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) float32 [length, Hkv, D]: the first `length` tokens of the sequence with this row [MB] of block ids.

    Keys come as held, rotated where the cache rotates.
    """
    position = torch.arange(length, device=cache.k.device)
    block = block_table_row.to(cache.k.device).long()[position // cache.block_size]
    offset = position % cache.block_size

    def read(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        raw = values.view(torch.uint8)[block, :, offset].view(values.dtype)
        return dequantize(raw, None if scales is None else scales[block, :, offset], cache.kind)

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)

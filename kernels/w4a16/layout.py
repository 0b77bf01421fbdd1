"""The one packed layout that AWQ, GPTQ and compressed-tensors layers are brought into at load.

It is the order in which the tensor cores take the left operand of `W @ x^T`, so that a thread's 16-byte load is its
own `mma` fragment and no weight goes through shared memory. With C = 16 / bits codes a half word, a block is 16 rows by
32 C columns (C planes of 32), stored as int32 words in the order

    [half h of 2][row g of 8][quad t of 4][pair i of 4]        word (h, g, t, i) holds row 8 h + g

and code j (j < C) of the word's half e (e < 2; e = 0 is the low one) is the weight at column 32 j + 8 i + 2 t + e of
the block. `words` is [N16, KB, 256] with N16 = ceil(N / 16) and KB = ceil(K / (32 C)).

`scales_zeros` is int32 [G, N16, 8, 2]: element (g, n, r, h) belongs to row 16 n + 8 h + r; its low half is the fp16
scale divided by `multiplier` (a power of two, so this is exact and keeps small scales out of the subnormals), its high
half is fp16 1024 + zero point. There is a group for every column of every block; past K the scales are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

BITS = (4, 8)
GROUPS = (16, 32, 64, 128)
PLANE = 32
WORDS = 256


@dataclass(frozen=True)
class W4A16Weight:
    """A linear layer's weight, packed. N = out_features, K = in_features.

    words, scales_zeros: see the module's docstring. group_size: columns a scale, a power of two, or 0 for one group.
    perm: int32 [KB * block], the column of x that stands at each packed place (K for padding,
    where x counts as 0), or None when the order is x's own.
    """

    words: torch.Tensor
    scales_zeros: torch.Tensor
    perm: torch.Tensor | None
    n: int
    k: int
    bits: int
    group_size: int
    multiplier: float

    @property
    def block(self) -> int:
        """Columns a block of words holds."""
        return PLANE * (16 // self.bits)

    @property
    def k_padded(self) -> int:
        """Columns the packed words cover, padding included."""
        return self.words.shape[1] * self.block

    def nbytes(self) -> int:
        """Bytes that the packed tensors take."""
        tensors = [self.words, self.scales_zeros] + ([] if self.perm is None else [self.perm])
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: torch.device | str) -> W4A16Weight:
        """The same weight on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> W4A16Weight:
        """The weight with each tensor changed."""
        perm = None if self.perm is None else change(self.perm)
        return replace(self, words=change(self.words), scales_zeros=change(self.scales_zeros), perm=perm)

    @staticmethod
    def pack(
        q: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        g_idx: torch.Tensor | None,
        bits: int,
        group_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float16,
    ) -> W4A16Weight:
        """Pack one layer on `device`.

        q: uint8 [N, K], codes below 2**bits. scales: floating [N, G]. zeros: integer [N, G], at most 2**bits.
        g_idx: int [K], the group of each column, or None where it is k // group_size (the last group may be short).
        bits: 2 to 8; up to 4 are stored as 4 and the rest as 8. group_size: at least 1, or -1 for one group of all K.
        dtype: the activations' (float16 or bfloat16); the packed form does not depend on it, it is only checked.

        Raises ValueError for shapes or values that contradict each other, with what was got and what is allowed.
        """
        _check(q, scales, zeros, g_idx, bits, group_size, dtype)
        q, scales, zeros = q.to(device), scales.to(device), zeros.to(device)
        n, k = q.shape
        stored = 4 if bits <= 4 else 8
        size = group_size if 0 < group_size < k else k
        perm = None if g_idx is None else _sorted_columns(g_idx.to(device).long(), size)
        if perm is not None and perm.numel() == 0:
            perm, owners, size = _padded_columns(g_idx.to(device).long(), k)  # type: ignore[union-attr]
            scales, zeros = scales[:, owners], zeros[:, owners]
        elif perm is not None and bool((perm == torch.arange(k, device=perm.device)).all()):
            perm = None
        size, scales, zeros = _split_groups(size, k if perm is None else perm.numel(), scales, zeros)
        block = PLANE * (16 // stored)
        columns = math.ceil((k if perm is None else perm.numel()) / block) * block
        if perm is not None:
            perm = torch.cat([perm, perm.new_full((columns - perm.numel(),), k)])
        words = _pack_words(_reorder(q, perm, columns), stored)
        groups = math.ceil(columns / size) if size else 1
        scales_zeros, multiplier = _pack_scales(scales, zeros, groups)
        perm32 = None if perm is None else perm.to(torch.int32)
        return W4A16Weight(words, scales_zeros, perm32, n, k, stored, size, multiplier)


def _check(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(f"w4a16: bits={bits}; 2 to 8 can be packed")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"w4a16: activations of {dtype}; float16 and bfloat16 are served")
    if q.dtype != torch.uint8 or q.dim() != 2:
        raise ValueError(f"w4a16: codes must be uint8 [N, K], got {q.dtype} {list(q.shape)}")
    n, k = q.shape
    if n % 8 or k % 8:
        raise ValueError(f"w4a16: out_features={n} and in_features={k} must both be multiples of 8")
    if group_size < 1 and group_size != -1:
        raise ValueError(f"w4a16: group_size={group_size}; it must be at least 1, or -1 for one group")
    size = group_size if 0 < group_size < k else k
    groups = math.ceil(k / size)
    if g_idx is None and scales.shape[1:] != (groups,):
        raise ValueError(f"w4a16: in_features={k} in groups of {size} need {groups} scales a row, got {scales.shape}")
    if scales.shape != zeros.shape or scales.shape[0] != n:
        raise ValueError(f"w4a16: scales {list(scales.shape)} and zeros {list(zeros.shape)} must both be [{n}, groups]")
    if g_idx is not None and (g_idx.shape != (k,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= scales.shape[1]):
        raise ValueError(f"w4a16: g_idx must name one of {scales.shape[1]} groups for each of {k} columns")
    if int(zeros.min()) < 0 or int(zeros.max()) > 256:
        raise ValueError(f"w4a16: zero points {int(zeros.min())} to {int(zeros.max())}; 0 to 256 can be packed")


def _sorted_columns(g_idx: torch.Tensor, size: int) -> torch.Tensor:
    """Columns in the order of their groups, or an empty tensor where that does not give equal groups of `size`."""
    order = torch.argsort(g_idx, stable=True)
    if torch.equal(g_idx[order], torch.arange(g_idx.numel(), device=g_idx.device) // size):
        return order
    return order[:0]


def _padded_columns(g_idx: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Columns sorted by group, each group filled up to whole sixteens with column `k`; the group of each sixteen."""
    columns, owners = [], []
    for group in torch.unique(g_idx).tolist():
        members = torch.nonzero(g_idx == group).flatten()
        fill = -members.numel() % 16
        columns.append(torch.cat([members, members.new_full((fill,), k)]))
        owners += [group] * (columns[-1].numel() // 16)
    return torch.cat(columns), torch.tensor(owners, device=g_idx.device), 16


def paired_rows(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [2 size]: rows of gate [size] and then up [size], in eights by turns; size is a multiple of 8.

    A block of 16 rows is then 8 of gate and their 8 of up, which `mma` gives to one lane.
    """
    if size % 8:
        raise ValueError(f"w4a16: gate and up have {size} rows; multiples of 8 can be paired")
    return torch.arange(2 * size, device=device).view(2, size // 8, 8).transpose(0, 1).flatten()


def servable_group(size: int, columns: int) -> int:
    """The group size that the kernels serve for groups of `size` columns: 0 for one group, or a divisor of it.

    Raises ValueError for sizes that 16 does not divide.
    """
    if size >= columns:
        return 0
    if size >= 128 and size & (size - 1) == 0:
        return size
    fit = next((g for g in reversed(GROUPS) if size % g == 0), None)
    if fit is None:
        raise ValueError(f"w4a16: group_size={size}; multiples of 16 are served, or -1 for one group")
    return fit


def _split_groups(
    size: int, columns: int, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    # scales are repeated where a group had to be split
    fit = servable_group(size, columns)
    if fit in (0, size):
        return fit, scales, zeros
    repeats, keep = size // fit, math.ceil(columns / fit)
    return fit, scales.repeat_interleave(repeats, 1)[:, :keep], zeros.repeat_interleave(repeats, 1)[:, :keep]


def _reorder(q: torch.Tensor, perm: torch.Tensor | None, columns: int) -> torch.Tensor:
    n, k = q.shape
    if perm is not None:
        q = torch.cat([q, q.new_zeros(n, 1)], 1).index_select(1, perm)
    elif columns != k:
        q = torch.cat([q, q.new_zeros(n, columns - k)], 1)
    if n % 16:
        q = torch.cat([q, q.new_zeros(16 - n % 16, columns)])
    return q


def _pack_words(q: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [16 n, columns] to int32 [n, KB, 256]."""
    codes = 16 // bits
    n16, kb = q.shape[0] // 16, q.shape[1] // (PLANE * codes)
    # rows n, h, g; columns kb, j, i, t, e
    q = q.view(n16, 2, 8, kb, codes, 4, 4, 2)
    words = torch.zeros(n16, kb, 2, 8, 4, 4, dtype=torch.int32, device=q.device)
    for j in range(codes):
        for e in range(2):
            part = q[:, :, :, :, j, :, :, e].permute(0, 3, 1, 2, 5, 4).to(torch.int32)
            words |= part << (bits * j + 16 * e)
    return words.view(n16, kb, WORDS)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of packing: int32 [N16, KB, 256] to uint8 [16 N16, KB * block]."""
    codes = 16 // bits
    n16, kb = words.shape[:2]
    words = words.view(n16, kb, 2, 8, 4, 4)
    q = torch.empty(n16, 2, 8, kb, codes, 4, 4, 2, dtype=torch.uint8, device=words.device)
    for j in range(codes):
        for e in range(2):
            part = (words >> (bits * j + 16 * e)) & (2**bits - 1)
            q[:, :, :, :, j, :, :, e] = part.permute(0, 2, 3, 1, 5, 4).to(torch.uint8)
    return q.view(n16 * 16, kb * codes * PLANE)


def _pack_scales(scales: torch.Tensor, zeros: torch.Tensor, groups: int) -> tuple[torch.Tensor, float]:
    # the columns that fill up the last block belong to groups too: their scale is 0
    missing = (0, groups - scales.shape[1])
    scales, zeros = torch.nn.functional.pad(scales, missing), torch.nn.functional.pad(zeros, missing)
    n = scales.shape[0]
    values = scales.float()
    largest = float(values.abs().max())
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    multiplier = 2.0**exponent
    halves = torch.stack([(values / multiplier).half(), (zeros.float() + 1024).half()], -1)
    halves = torch.nn.functional.pad(halves, (0, 0, 0, 0, 0, -n % 16))
    packed = halves.contiguous().view(torch.int32).view(-1, 2, 8, groups)
    return packed.permute(3, 0, 2, 1).contiguous(), multiplier


def unpack_scales(scales_zeros: torch.Tensor, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of packing: float32 scales [16 N16, G] and float32 zeros [16 N16, G]."""
    groups, n16 = scales_zeros.shape[:2]
    halves = scales_zeros.permute(1, 3, 2, 0).contiguous().view(n16 * 16, groups).view(torch.float16)
    halves = halves.view(n16 * 16, groups, 2).float()
    return halves[..., 0] * multiplier, halves[..., 1] - 1024

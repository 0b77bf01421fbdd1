"""How attention reaches keys and values: densely, within a batch of equal sequences, or through a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from qengine.kernels.fused.ref import rotate
from qengine.kernels.paged_attn.plan import PagedPlan
from qengine.kernels.paged_attn.ref import causal_attention, paged_attention, write_cache
from qengine.layers.norm import HeadNorm
from qengine.layers.rope import Rotary


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention, all but its weights.

    heads, kv_heads of head_dim; scale multiplies q.k; softcap: cap * tanh(x / cap) on the scores; sliding_window:
    tokens seen, the query's own included; head_norm: over q and k heads, before they are rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    head_norm: HeadNorm | None = None


class AttentionContext(Protocol):
    """What a decoder layer asks of the sequences it runs on."""

    def attend_joined(
        self, layer_index: int, qkv: torch.Tensor, rotary: Rotary | None, shape: AttentionShape
    ) -> torch.Tensor:
        """Norm and rotate the heads of qkv [T, (Hq + 2 Hkv) * D], keep keys and values, attend: [T, Hq * D].

        qkv may be overwritten.
        """
        ...

    def token_lengths(self, device: torch.device) -> torch.Tensor:
        """int64 [T]: for each token the length that its sequence's rotary embedding goes by (see layers/rope.py)."""
        ...


class _SplitHeads:
    """attend_joined in plain torch, for contexts that attend with q, k and v apart."""

    def attend_joined(
        self, layer_index: int, qkv: torch.Tensor, rotary: Rotary | None, shape: AttentionShape
    ) -> torch.Tensor:
        """See AttentionContext."""
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        turning = shape.heads + shape.kv_heads
        qk, v = heads[:, :turning], heads[:, turning:]
        if shape.head_norm is not None:
            qk = shape.head_norm(qk)
        if rotary is not None:
            qk = rotate(qk, rotary.cos, rotary.sin, rotary.interleaved)
        q, k = qk[:, : shape.heads], qk[:, shape.heads :]
        options = {"scale": shape.scale, "softcap": shape.softcap, "sliding_window": shape.sliding_window}
        return self.attend(layer_index, q, k, v, **options).reshape(qkv.shape[0], -1)  # type: ignore[arg-type]

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention: q [T, Hq, D], k and v [T, Hkv, D] of the step's tokens; returns [T, Hq, D]."""
        raise NotImplementedError


class DenseContext(_SplitHeads):
    """`batch` sequences of `length` tokens each, one after the other, without a cache."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch = batch
        self.length = length

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See _SplitHeads."""
        parts = [
            causal_attention(*(x[rows] for x in (q, k, v)), scale=scale, softcap=softcap, sliding_window=sliding_window)
            for rows in (slice(i * self.length, (i + 1) * self.length) for i in range(self.batch))
        ]
        return parts[0] if self.batch == 1 else torch.cat(parts)

    def token_lengths(self, device: torch.device) -> torch.Tensor:
        """See AttentionContext."""
        return torch.full((self.batch * self.length,), self.length, dtype=torch.int64, device=device)


class CacheShape(Protocol):
    """What a cache needs to know of a model."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


@dataclass
class KVCache:
    """Keys and values: one tensor [num_blocks, block_size, Hkv, D] a layer, for k and for v."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, spec: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """An empty cache: zeros, so that whatever is read by mistake is finite."""
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        k, v = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)] for _ in range(2))
        return cls(k, v)

    @staticmethod
    def bytes_per_block(spec: CacheShape, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.k[0].shape[1]


@dataclass
class PagedBatch:
    """The sequences of one step, in the order of its tokens.

    query_lens: new tokens a sequence. context_lens: tokens already cached. block_tables: int32 [S, max_blocks].
    slot_mapping: int64 [T], block * block_size + offset of each new token. prompt_lens: whole prompt lengths, wanted
    where a prompt is given in chunks and the model's rotary embedding depends on length (longrope, dynamic).
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    prompt_lens: list[int] | None = None


class PagedContext(_SplitHeads):
    """A step on a paged cache: each layer writes its new keys and values, then attends. Good for one forward pass."""

    def __init__(self, cache: KVCache, batch: PagedBatch) -> None:
        self.cache = cache
        self.batch = batch
        self._plan = PagedPlan(batch.query_lens, batch.context_lens, batch.block_tables, cache.block_size)

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See _SplitHeads."""
        k_cache, v_cache = self.cache.k[layer_index], self.cache.v[layer_index]
        write_cache(k, v, k_cache, v_cache, self.batch.slot_mapping)
        return paged_attention(
            q, k_cache, v_cache, self._plan, scale=scale, softcap=softcap, sliding_window=sliding_window
        )

    def token_lengths(self, device: torch.device) -> torch.Tensor:
        """See AttentionContext."""
        batch = self.batch
        totals = [new + old for new, old in zip(batch.query_lens, batch.context_lens, strict=True)]
        if batch.prompt_lens is not None:
            totals = [max(total, prompt) for total, prompt in zip(totals, batch.prompt_lens, strict=True)]
        counts = torch.tensor(batch.query_lens, device=device)
        return torch.tensor(totals, device=device).repeat_interleave(counts)

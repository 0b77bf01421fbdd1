"""Attention of a step on a GPU: the fused cache write, then the decode and the prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.kernels.paged_attn.cache import KVPool, LayerCache
from qengine.kernels.paged_attn.decode import paged_decode
from qengine.kernels.paged_attn.prefill import paged_prefill
from qengine.kernels.paged_attn.write import write_kv
from qengine.layers.attention import AttentionShape
from qengine.layers.rope import Rotary


@dataclass(frozen=True)
class DeviceBatch:
    """The sequences of one step; those with a single new token have the first rows, and the first tokens.

    block_tables: int32 [S, MB], entries beyond a sequence's blocks are not read. seq_lens: int32 [S], tokens cached
    after the step; 0 for a row that only fills up a CUDA graph. slots: int64 [T], block * block_size + offset of each
    new token; negative ones are not written. decode_rows: leading rows, which are for one new token each: the tokens
    of the same number. Where these are more than there are such sequences, the rest have length 0, and their tokens may
    be those of other sequences. query_starts: int32 [P + 1], where the tokens of each sequence of the other rows begin,
    and those of the last one end; None without any. max_query_len, max_seq_len: no query or sequence is longer.
    lengths: int64 [T], the length that each token's rotary embedding goes by, for models that want it.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    decode_rows: int
    max_seq_len: int
    query_starts: torch.Tensor | None = None
    max_query_len: int = 1
    lengths: torch.Tensor | None = None


class DeviceContext:
    """An AttentionContext over a KVPool. layers: the pool's views by layer, made once by the pool's owner."""

    def __init__(self, layers: list[LayerCache], batch: DeviceBatch) -> None:
        self._layers = layers
        self._batch = batch

    def attend_joined(
        self, layer_index: int, qkv: torch.Tensor, rotary: Rotary | None, shape: AttentionShape
    ) -> torch.Tensor:
        """See AttentionContext."""
        cache, batch, norm = self._layers[layer_index], self._batch, shape.head_norm
        write_kv(
            qkv,
            cache,
            batch.slots,
            num_heads=shape.heads,
            head_norm=None if norm is None else norm.weight,
            norm_kind="rms" if norm is None else norm.kind,
            norm_eps=0.0 if norm is None else norm.eps,
            cos=None if rotary is None else rotary.cos,
            sin=None if rotary is None else rotary.sin,
            interleaved=rotary is not None and rotary.interleaved,
        )
        q = qkv[:, : shape.heads * shape.head_dim].view(-1, shape.heads, shape.head_dim)
        out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
        rows = batch.decode_rows
        if rows:
            paged_decode(
                q[:rows],
                cache,
                batch.block_tables[:rows],
                batch.seq_lens[:rows],
                out[:rows],  # rows of length 0 become 0, and then what prefill makes of them
                max_seq_len=batch.max_seq_len,
                scale=shape.scale,
                softcap=shape.softcap,
                sliding_window=shape.sliding_window,
            )
        if batch.query_starts is not None:
            paged_prefill(
                q,
                cache,
                batch.block_tables[rows:],
                batch.seq_lens[rows:],
                batch.query_starts,
                out,
                max_query_len=batch.max_query_len,
                scale=shape.scale,
                softcap=shape.softcap,
                sliding_window=shape.sliding_window,
            )
        return out.view(out.shape[0], -1)

    def token_lengths(self, device: torch.device) -> torch.Tensor:
        """See AttentionContext."""
        assert self._batch.lengths is not None, "the model's rotary embedding needs the lengths of the sequences"
        return self._batch.lengths


def pool_layers(pool: KVPool) -> list[LayerCache]:
    """The views of all layers."""
    return [pool.layer(index) for index in range(pool.num_layers)]

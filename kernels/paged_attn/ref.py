r"""Attention over a paged key-value cache, in plain torch.

For a query at position p of its sequence, with keys at positions j of the same sequence:

    s_j = scale * q . k_j                   (softcap c: s_j <- c * tanh(s_j / c))
    out = sum_j softmax(s)_j v_j            over max(0, p - window + 1) <= j <= p

Query head h reads key-value head h // (Hq / Hkv). The cache of a layer is [num_blocks, block_size, Hkv, D]; position j
lies in slot block_table[j // block_size] * block_size + j % block_size. A window counts the query's own token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qengine.kernels.fused.ref import cast
from qengine.kernels.paged_attn.plan import DecodeRows, PagedPlan

QUERY_CHUNK = 512
"""Queries that are masked at once: a prompt's mask takes QUERY_CHUNK * length values, not length^2."""


def write_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Put k, v [T, Hkv, D] of new tokens into slots int64 [T] of the caches [num_blocks, block_size, Hkv, D]."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, cast(new, cache.dtype))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend with q [T, Hq, D] to the cache, which already holds this step's keys and values. Returns [T, Hq, D]."""
    keys, values = k_cache.view(-1, *k_cache.shape[2:]), v_cache.view(-1, *v_cache.shape[2:])
    decode = plan.decode(sliding_window)
    if len(decode) == 1 and decode[0].rows is None:
        return _decode(q, keys, values, decode[0], scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for batch in decode:
        assert batch.rows is not None, "a step of several batches names the rows of each"
        out.index_copy_(0, batch.rows, _decode(q.index_select(0, batch.rows), keys, values, batch, scale, softcap))
    for part in plan.prefill:
        k, v = (c.index_select(0, part.slots).to(q.dtype) for c in (keys, values))
        rows = slice(part.start, part.stop)
        out[rows] = causal_attention(q[rows], k, v, scale=scale, softcap=softcap, sliding_window=sliding_window)
    return out


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of one sequence's last T tokens to all its L. q [T, Hq, D]; k, v [L, Hkv, D]; returns [T, Hq, D]."""
    count, heads, size = q.shape
    length, kv_heads = k.shape[0], k.shape[1]
    group = heads // kv_heads
    queries = q.view(count, kv_heads, group, size).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1)[:, None].expand(kv_heads, group, length, size) for x in (k, v))
    windowed = sliding_window is not None and length > sliding_window
    if count == length and not windowed and softcap is None:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(count, heads, size)
    result = torch.empty_like(q)
    context = length - count
    for start in range(0, count, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, count)
        low = max(0, context + start - sliding_window + 1) if windowed and sliding_window else 0
        high = context + stop
        mask = _mask(range(context + start, high), range(low, high), sliding_window, q.device)
        part = _attend(queries[:, :, start:stop], keys[:, :, low:high], values[:, :, low:high], mask, scale, softcap)
        result[start:stop] = part.permute(2, 0, 1, 3).reshape(stop - start, heads, size)
    return result


def last_token_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of a sequence's newest token to all its L. q [Hq, D]; k, v [L, Hkv, D]; returns [Hq, D].

    By plain products: what the decode kernel is compared with on a GPU shares nothing with torch's fused attention.
    """
    if sliding_window is not None:
        k, v = k[-sliding_window:], v[-sliding_window:]
    heads, size = q.shape
    grouped = q.view(k.shape[1], heads // k.shape[1], size)
    scores = torch.einsum("kgd,lkd->kgl", grouped, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("kgl,lkd->kgd", torch.softmax(scores, dim=-1), v).reshape(heads, size)


def _mask(queries: range, keys: range, window: int | None, device: torch.device) -> torch.Tensor:
    """Additive float32 [queries, keys]: 0 where the query sees the key, else -inf."""
    place = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None]
    hidden = key > place
    if window is not None:
        hidden |= key <= place - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeRows, scale: float, softcap: float | None
) -> torch.Tensor:
    """One query a row, all rows of a batch in one product: q [S, Hq, D], keys and values [slots, Hkv, D]."""
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    if isinstance(batch.slots, slice):
        k, v = keys[batch.slots][None], values[batch.slots][None]
    else:
        flat = batch.slots.view(-1)
        shape = (rows, batch.slots.shape[1], kv_heads, size)
        k, v = keys.index_select(0, flat).view(shape), values.index_select(0, flat).view(shape)
    k, v = cast(k, q.dtype).transpose(1, 2), cast(v, q.dtype).transpose(1, 2)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, size)
    return _attend(grouped, k, v, batch.mask, scale, softcap).reshape(rows, heads, size)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention of q [A, B, Tq, D] to k, v [A, B, Tk, D]; mask additive, broadcast to [A, B, Tq, Tk]."""
    if softcap is None:
        mask = mask if mask is None else cast(mask, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)

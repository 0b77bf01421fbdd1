"""tiny_models.PagedRun on a GPU: the fused kernels over a paged pool, in float16."""

from __future__ import annotations

import torch
from tiny_models import PagedRun

from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool
from qengine.layers.attention_device import DeviceBatch, DeviceContext, pool_layers
from qengine.models import Decoder


class DeviceRun(PagedRun):
    """Sequences decoded through a pool whose blocks are dealt at random. kind: how the pool holds keys and values."""

    def __init__(
        self, model: Decoder, capacity: list[int], block_size: int = 16, seed: int = 1, kind: Kind = "float16"
    ) -> None:
        super().__init__(model, capacity, block_size, seed)
        total = self.cache.k[0].shape[0]
        del self.cache
        layout = BlockLayout(kind, model.spec.num_kv_heads, model.spec.head_dim, block_size)
        pool = KVPool.allocate(layout, model.spec.num_layers, total, model.device)
        pool.storage.fill_(0x7E)  # NaN in float16: what is never written must never matter
        self.layers = pool_layers(pool)

    @torch.no_grad()
    def step(self, parts: dict[int, torch.Tensor], prompts: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        """See PagedRun.step; parts and results are on the CPU."""
        rows = sorted(parts, key=lambda row: len(parts[row]) > 1)
        counts = [len(parts[row]) for row in rows]
        ends = [self.cached[row] + count for row, count in zip(rows, counts, strict=True)]
        decode = sum(count == 1 for count in counts)
        places = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        slots = [self._slot(row, p) for row, span in zip(rows, places, strict=True) for p in span]
        widest = max(len(self.tables[row]) for row in rows)
        tables = [self.tables[r] + [0] * (widest - len(self.tables[r])) for r in rows]
        lengths = [max(end, (prompts or {}).get(row, 0)) for row, end in zip(rows, ends, strict=True)]
        starts = [sum(counts[:i]) for i in range(decode, len(rows) + 1)]
        place = {"device": self.model.device}
        batch = DeviceBatch(
            torch.tensor(tables, dtype=torch.int32, **place),
            torch.tensor(ends, dtype=torch.int32, **place),
            torch.tensor(slots, **place),
            decode,
            max_seq_len=max(ends),
            query_starts=torch.tensor(starts, dtype=torch.int32, **place) if decode < len(rows) else None,
            max_query_len=max(counts),
            lengths=torch.tensor(lengths, **place).repeat_interleave(torch.tensor(counts, **place)),
        )
        positions = torch.tensor([p for ps in places for p in ps], **place)
        ids = torch.cat([parts[r] for r in rows]).to(self.model.device)
        hidden = self.model.forward(ids, positions, DeviceContext(self.layers, batch))
        for row, count in zip(rows, counts, strict=True):
            self.cached[row] += count
        return dict(zip(rows, self.model.logits(hidden).cpu().split(counts), strict=True))

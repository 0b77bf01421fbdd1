# mypy: disable-error-code="no-untyped-def"
"""Token ids that the host does not know yet: taken on the device from what the step before sampled.

A step is put together while the one before it still runs. Where a sequence's next input is the token that is being
sampled, the host writes -1 - row, and the row of the last step's tokens stands for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def resolve_ids_kernel(ids_ptr, last_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """out[i] = ids[i], or last[-1 - ids[i]] where ids[i] is negative."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    ids = tl.load(ids_ptr + at, mask, other=0)
    unknown = ids < 0
    sampled = tl.load(last_ptr + tl.where(unknown, -1 - ids, 0), mask & unknown, other=0)
    tl.store(out_ptr + at, tl.where(unknown, sampled, ids), mask)


def resolve_ids(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """int64 [T]: ids, with last[-1 - id] in place of each negative id. ids int64 [T], last int64 [R], on one device."""
    if ids.is_cpu:
        return resolve_ids_ref(ids, last)
    out = torch.empty_like(ids)
    if ids.numel():
        resolve_ids_kernel[(triton.cdiv(ids.numel(), 256),)](ids, last, out, ids.numel(), BLOCK=256, num_warps=4)
    return out


def resolve_ids_ref(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """resolve_ids in plain torch."""
    return torch.where(ids < 0, last[(-1 - ids).clamp_min(0)], ids)

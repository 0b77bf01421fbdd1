"""Token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Embedding:
    """Rows of weight [V, H] for token ids, in `out_dtype`.

    The table keeps the dtype it is stored in: widening a row at look-up is exact, and half the memory of widening the
    table. scale: multiplies the rows; Gemma rounds it to the model's dtype first, so it must come rounded. device: of
    the ids and the rows; the table may lie in pinned host memory beside a CUDA device, which then reads its rows.
    """

    def __init__(self, weight: torch.Tensor, scale: float, out_dtype: torch.dtype, device: torch.device) -> None:
        self.weight = weight
        self.device = device
        self.scale = scale
        self.out_dtype = out_dtype

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]."""
        if input_ids.is_cuda:
            from qengine.kernels.fused import ops

            return ops.embed(input_ids, self.weight, self.scale, self.out_dtype)
        rows = F.embedding(input_ids, self.weight).to(self.out_dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def nbytes(self) -> int:
        """Bytes that the table takes on the device."""
        return self.weight.nbytes if self.weight.device.type == self.device.type else 0

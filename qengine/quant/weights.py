"""The one in-memory form that every checkpoint format is unpacked to, one layer at a time.

All matrices are in Hugging Face's orientation: N = out_features rows, K = in_features columns, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantSpec:
    """How one linear layer is quantized, as its checkpoint says.

    bits: 2 to 8. group_size: input columns that share a scale; -1 is one group of all K. sym: informative only, zeros
    are always read. desc_act: the groups are not contiguous (decided by g_idx). method: awq, gptq, compressed-tensors.
    format: the packing, such as gemm, gemv, gemv_fast, gptq, gptq_v2, gptq_p, pack-quantized, naive-quantized.
    """

    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    method: str
    format: str


@dataclass
class PlainWeight:
    """A linear layer that is not quantized: weight [N, K], bias [N] or None, floating dtype as stored."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass
class QuantizedWeight:
    """A quantized linear layer, unpacked: W[n, k] = (q[n, k] - zeros[n, g]) * scales[n, g] with g = g_idx[k].

    q: uint8 [N, K], codes in [0, 2**bits). scales: float16, bfloat16 or float32 [N, G]. zeros: int16 [N, G],
    in [0, 2**bits). g_idx: int32 [K], or None where g = k // group_size. bias: [N] or None.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    spec: QuantSpec
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def group_size(self) -> int:
        """Columns a group, with -1 resolved to K."""
        return self.spec.group_size if self.spec.group_size > 0 else self.q.shape[1]

    def group_index(self) -> torch.Tensor:
        """int64 [K]: the group of each input column."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.q.shape[1], device=self.q.device) // self.group_size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [N, K] in `dtype`, rounded to the scales' dtype first, as every writing library computes it."""
        g = self.group_index()
        scales = self.scales.float().index_select(1, g)
        zeros = self.zeros.float().index_select(1, g)
        # (q - z) has at most 9 bits and a 16-bit scale at most 11: the float32 product is exact, so this rounds once.
        return ((self.q.float() - zeros) * scales).to(self.scales.dtype).to(dtype)


LinearWeight = PlainWeight | QuantizedWeight

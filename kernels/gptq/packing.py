"""Pack and unpack GPTQ's layouts: v1, v2 and the split planes of `gptq_p`. References in plain torch.

W[n, k] = (q[n, k] - zeros[n, g_idx[k]]) * scales[n, g_idx[k]]. q uint8 [N, K], zeros int16 [N, G], scales [N, G],
g_idx int32 [K]. Files hold qweight int32 [ceil(K*bits/32), N] (codes run down K), qzeros int32 [G, ceil(N*bits/32)]
(codes run along N), scales [G, N]. v1 stores z - 1, v2 and gptq_p store z.
"""

from __future__ import annotations

import torch

from qengine.kernels.bitstream import check_codes, pack_planes, pack_stream, unpack_planes, unpack_stream

# A one in every field of a word. Added and subtracted as a whole, so that a zero point of 0 borrows and gives it back.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def _wrapped_add(words: torch.Tensor, value: int) -> torch.Tensor:
    total = (words.to(torch.int64) + value) & 0xFFFFFFFF
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def pack_gptq(
    q: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    *,
    g_idx: torch.Tensor | None = None,
    v2: bool = False,
    planar: bool = False,
) -> dict[str, torch.Tensor]:
    """qweight, qzeros, scales and g_idx as GPTQModel writes them.

    g_idx None means k // (K / G). v1's z - 1 is taken from the whole word where fields do not straddle words (2, 4 and
    8 bit), per code otherwise. planar: `gptq_p` (K and N multiples of 32; its zeros are v2's). float32 scales become
    float16. ValueError for codes out of range or a K that G does not divide.
    """
    check_codes(q, bits, "q")
    check_codes(zeros, bits, "zeros")
    in_features, groups = q.shape[1], zeros.shape[1]
    if g_idx is None:
        if in_features % groups:
            raise ValueError(f"gptq: in_features={in_features} in {groups} groups needs an explicit g_idx")
        g_idx = torch.arange(in_features, device=q.device) // (in_features // groups)
    pack = pack_planes if planar else pack_stream
    if v2 or planar:
        qzeros = pack(zeros.t().contiguous(), bits)
    elif bits in ONES:
        qzeros = _wrapped_add(pack_stream(zeros.t().contiguous(), bits), -ONES[bits])
    else:
        qzeros = pack_stream((zeros.t().contiguous().to(torch.int16) - 1) & (2**bits - 1), bits)
    kept = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.to(torch.float16)
    return {
        "qweight": pack(q, bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": kept.t().contiguous(),
        "g_idx": g_idx.to(torch.int32).contiguous(),
    }


def unpack_zeros(
    qzeros: torch.Tensor, bits: int, out_features: int, *, v2: bool, wordwise: bool = True, planar: bool = False
) -> torch.Tensor:
    """Zero points int16 [N, G] of qzeros int32 [G, W].

    wordwise: v1's one is added to the whole word (GPTQModel, optimum), which also restores zero points of 0. Otherwise
    per code, (c + 1) mod 2**bits (AutoGPTQ, whose writer destroys a word with a zero point of 0).
    """
    if planar:
        return unpack_planes(qzeros, bits, out_features).t().contiguous().to(torch.int16)
    if not v2 and wordwise and bits in ONES:
        return unpack_stream(_wrapped_add(qzeros, ONES[bits]), bits, out_features).t().contiguous().to(torch.int16)
    codes = unpack_stream(qzeros, bits, out_features).t().contiguous().to(torch.int16)
    return codes if v2 else (codes + 1) & (2**bits - 1)


def unpack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    *,
    in_features: int | None = None,
    v2: bool = False,
    wordwise: bool = True,
    planar: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of pack_gptq: (q uint8 [N, K], zeros int16 [N, G], scales [N, G] in their own dtype).

    in_features: K; None is the most that qweight can hold (needed where K*bits is no multiple of 32). The other flags
    as in `unpack_zeros`.
    """
    count = qweight.shape[0] * 32 // bits if in_features is None else in_features
    turned = qweight.t().contiguous()
    q = unpack_planes(turned, bits, count) if planar else unpack_stream(turned, bits, count)
    zeros = unpack_zeros(qzeros, bits, scales.shape[1], v2=v2, wordwise=wordwise, planar=planar)
    return q.contiguous(), zeros, scales.t().contiguous()

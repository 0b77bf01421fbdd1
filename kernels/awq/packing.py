"""Pack and unpack AWQ's three layouts. References in plain torch; W[n, k] = (q[n, k] - zeros[n, k // g]) * scales[n,
k // g].

Everywhere: q uint8 [N, K], zeros int16 [N, G], scales [N, G]; G groups of g inputs, g = ceil(K / G).
"""

from __future__ import annotations

import math

import torch

from qengine.kernels.bitstream import as_bytes, check_codes, pack_stream, unpack_stream

# 4-bit GEMM: nibble i of a word is output INTERLEAVE[i] of its eight (the order that AWQ's CUDA kernel unpacks fast).
INTERLEAVE = (0, 2, 4, 6, 1, 3, 5, 7)


def _pack_interleaved(codes: torch.Tensor) -> torch.Tensor:
    """[N, R] 4-bit codes -> int32 [R, N / 8] in AWQ's order: transposed last, as words are cheaper to transpose."""
    octets = codes.unflatten(0, (-1, 8))
    words = torch.zeros(octets.shape[0], octets.shape[2], dtype=torch.int32, device=codes.device)
    for nibble, output in enumerate(INTERLEAVE):
        words |= octets[:, output].to(torch.int32) << (4 * nibble)
    return words.t().contiguous()


def _unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [8 * C, R]: transposed on the way, as words are cheaper to transpose than codes."""
    turned = words.t().contiguous()
    out = torch.empty(turned.shape[0], 8, turned.shape[1], dtype=torch.uint8, device=words.device)
    for nibble, output in enumerate(INTERLEAVE):
        out[:, output] = (turned >> (4 * nibble)).bitwise_and_(15)
    return out.flatten(0, 1)


def pack_gemm(q: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """q [N, K], zeros [N, G], scales [N, G] -> qweight int32 [K, N*bits/32], qzeros int32 [G, N*bits/32], scales [G,
    N].

    4 bit: AWQ's interleaved order; other widths (GPTQModel): a dense stream along N in natural order. float32 scales
    become float16, 16-bit ones stay as they are. ValueError where N*bits is no multiple of 32 or codes are out of
    range.
    """
    check_codes(q, bits, "q")
    check_codes(zeros, bits, "zeros")
    if q.shape[0] * bits % 32:
        raise ValueError(f"awq gemm: out_features={q.shape[0]} times bits={bits} must be a multiple of 32")
    pack = _pack_interleaved if bits == 4 else lambda codes: pack_stream(codes.t().contiguous(), bits)
    kept = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.to(torch.float16)
    return {
        "qweight": pack(q),
        "qzeros": pack(zeros),
        "scales": kept.t().contiguous(),
    }


def unpack_gemm(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of pack_gemm: (q uint8 [N, K], zeros int16 [N, G], scales [N, G] in their own dtype)."""
    out_features = scales.shape[1]
    if bits == 4:
        q, zeros = _unpack_interleaved(qweight)[:out_features], _unpack_interleaved(qzeros)[:out_features]
    else:
        q = unpack_stream(qweight, bits, out_features).t().contiguous()
        zeros = unpack_stream(qzeros, bits, out_features).t().contiguous()
    return q, zeros.to(torch.int16), scales.t().contiguous()


def _gemv_zero_words(in_features: int, group_size: int) -> int:
    """int32 words a row of GEMV's zero points, padded as its kernel wants them."""
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    groups = math.ceil(in_features / group_size)
    return math.ceil(groups / 8 / multiple) * multiple


def pack_gemv(q: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """4-bit GEMV layout: qweight int32 [N, K/8], qzeros int32 [N, Zw], scales [N, 8*Zw], zero-padded past group G."""
    check_codes(q, 4, "q")
    check_codes(zeros, 4, "zeros")
    padding = 8 * _gemv_zero_words(q.shape[1], group_size) - zeros.shape[1]
    return {
        "qweight": pack_stream(q, 4),
        "qzeros": pack_stream(torch.nn.functional.pad(zeros, (0, padding)), 4),
        "scales": torch.nn.functional.pad(scales, (0, padding)),
    }


def unpack_gemv(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of pack_gemv for `groups` real groups: (q, zeros, scales)."""
    q = unpack_stream(qweight, 4, 8 * qweight.shape[1])
    return q, unpack_stream(qzeros, 4, groups).to(torch.int16), scales[:, :groups].contiguous()


def unpack_gemv_fast(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4-bit GEMV-fast (llm-awq v2): (q, zeros, scales) of `groups` real groups; N % 4 == 0, K % 64 == 0.

    qweight int16 [N/4, K]: four rows interleaved in blocks of 64 inputs. scales, qzeros fp16 [8*Zw, N]; qzeros holds
    -(scale * zero) rounded to fp16, from which the integer zero point is recovered. ValueError if one is no integer.
    """
    quarter, in_features = qweight.shape
    tiles = in_features // 64
    # Words are read as four nibbles each: [N/4, tiles, 64 words, 4 nibbles] -> rows of 64 inputs, four rows a tile.
    codes = unpack_stream(as_bytes(qweight).view(torch.int32), 4, 4 * in_features)
    rows = codes.view(quarter, tiles, 4, 64).transpose(1, 2).reshape(4 * quarter, in_features // 32, 32)
    rows = rows.view(-1, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 4, 2).transpose(1, 2)
    q = rows.reshape(4 * quarter, in_features)
    used, folded = scales[:groups].t().contiguous(), qzeros[:groups].t().float()
    return q, _recover_zeros(used.float(), folded), used


def _recover_zeros(scales: torch.Tensor, folded: torch.Tensor) -> torch.Tensor:
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    exact = torch.where(scales == 0, torch.zeros_like(folded), -folded / safe)
    zeros = exact.round()
    # fp16 spaces its subnormals evenly: there s*z is off by up to half of 2**-24, whatever its size.
    slack = 0.02 + 2.0**-25 / safe.abs()
    bad = ((exact - zeros).abs() > slack) | (zeros < 0) | (zeros > 15)
    if bool(bad.any()):
        raise ValueError(f"qzeros of {int(bad.sum())} groups are not -(scale * integer) with an integer from 0 to 15")
    return zeros.to(torch.int16)

"""Dense little-endian streams of b-bit codes in int32 words: the layout under GPTQ, AWQ (other than 4 bit) and
compressed-tensors.

Code i of a row lies in bits i*b .. i*b+b-1 of the row's words, word 0 first, bit 0 lowest; it may straddle two words.
Unused high bits of the last word are zero.
"""

from __future__ import annotations

import math

import torch

BITS = range(2, 9)


def words_for(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // 32)


def check_codes(codes: torch.Tensor, bits: int, what: str = "codes") -> None:
    """ValueError unless every integer in `codes` is in [0, 2**bits) and bits is 2 to 8."""
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not supported; use 2 to 8")
    if codes.is_floating_point() or codes.is_complex():
        raise ValueError(f"{what} must be integers, got {codes.dtype}")
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < 2**bits):
        raise ValueError(f"{what} must be in [0, {2**bits - 1}], got {int(codes.min())} to {int(codes.max())}")


def to_words(accumulated: torch.Tensor) -> torch.Tensor:
    """int64 values in [0, 2**32) as int32 of the same bits."""
    return torch.where(accumulated >= 2**31, accumulated - 2**32, accumulated).to(torch.int32)


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """The words' bytes, uint8 [..., W * itemsize]: a view where the memory is in order."""
    # A tensor with a dimension of size 1 may call itself contiguous with strides that a view of bytes refuses.
    in_order = (
        words.is_contiguous() and words.stride(-1) == 1 and all(s >= words.shape[-1] for s in words.stride()[:-1])
    )
    return (words if in_order else words.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def pack_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes [R, n] into int32 [R, ceil(n * bits / 32)]."""
    check_codes(codes, bits)
    rows, count = codes.shape
    per_block, step = 8 // math.gcd(8, bits), bits // math.gcd(8, bits)
    blocks = -(-count // per_block)
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, blocks * per_block - count)).view(
        rows, blocks, per_block
    )
    out = torch.zeros(rows, blocks, step, dtype=torch.uint8, device=codes.device)
    for i in range(per_block):
        byte, shift = divmod(i * bits, 8)
        code = padded[..., i]
        out[..., byte] |= code << shift
        if shift + bits > 8:
            out[..., byte + 1] |= code >> (8 - shift)
    words = torch.zeros(rows, words_for(count, bits), dtype=torch.int32, device=codes.device)
    data, used = words.view(torch.uint8), out.view(rows, blocks * step)
    filled = min(data.shape[1], used.shape[1])
    data[:, :filled] = used[:, :filled]
    return words


def unpack_stream(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes of every row: int32 [R, W] -> uint8 [R, count]. ValueError if W is too small."""
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not supported; use 2 to 8")
    rows, width = words.shape
    if words_for(count, bits) > width:
        raise ValueError(f"{count} codes of {bits} bits take {words_for(count, bits)} words, got {width}")
    per_block, step = 8 // math.gcd(8, bits), bits // math.gcd(8, bits)
    data = as_bytes(words)
    blocks = -(-count // per_block)
    data = torch.nn.functional.pad(data, (0, max(0, blocks * step - data.shape[1])))
    data = data[:, : blocks * step].reshape(rows, blocks, step)
    out = torch.empty(rows, blocks, per_block, dtype=torch.uint8, device=words.device)
    for i in range(per_block):
        byte, shift = divmod(i * bits, 8)
        code = data[..., byte] >> shift
        if shift + bits > 8:
            code |= data[..., byte + 1] << (8 - shift)
        out[..., i] = code.bitwise_and_(2**bits - 1)
    return out.view(rows, blocks * per_block)[:, :count]


# Split bit planes (GPTQModel's `gptq_p`): plane widths and their place in the code, lowest plane first.
PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    7: ((4, 0), (2, 4), (1, 6)),
    8: ((8, 0),),
}


def _bit_stream(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack [R, B, 32] values of `width` bits (1, 2, 4 or 8) into int64 words [R, B, width], natural order."""
    per_word = 32 // width
    shifts = torch.arange(per_word, device=values.device) * width
    return (values.to(torch.int64).unflatten(-1, (width, per_word)) << shifts).sum(-1)


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes [R, n], n a multiple of 32, into int32 [R, n * bits / 32]: planes of every 32 codes
    together."""
    check_codes(codes, bits)
    rows, count = codes.shape
    if count % 32:
        raise ValueError(f"split planes hold whole blocks of 32 codes, got {count}")
    blocks = codes.reshape(rows, count // 32, 32)
    planes = [_bit_stream((blocks >> low) & (2**width - 1), width) for width, low in PLANES[bits]]
    return to_words(torch.cat(planes, dim=-1).flatten(1))


def unpack_planes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of pack_planes: int32 [R, W] -> uint8 [R, count]. ValueError if W does not fit."""
    rows, width = words.shape
    if count % 32 or width * 32 != count * bits:
        raise ValueError(f"{count} codes of {bits} bits in split planes take {count * bits / 32} words, got {width}")
    blocks = words.contiguous().view(rows, count // 32, bits)
    out = torch.zeros(rows, count // 32, 32, dtype=torch.uint8, device=words.device)
    row = 0
    for plane, low in PLANES[bits]:
        data = as_bytes(blocks[..., row : row + plane])
        per_byte = 8 // plane
        fields = out.view(rows, count // 32, 32 // per_byte, per_byte)
        for i in range(per_byte):
            fields[..., i] |= ((data >> (plane * i)) & (2**plane - 1)) << low
        row += plane
    return out.view(rows, count)


def pack_padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes [R, n], floor(32 / bits) to a word and none straddling: int32 [R, ceil(n / floor(32 /
    bits))]."""
    check_codes(codes, bits)
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word, device=codes.device) * bits
    return to_words((padded.unflatten(1, (-1, per_word)) << shifts).sum(-1))


def unpack_padded(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of pack_padded: int32 [R, W] -> uint8 [R, count]. ValueError if W is too small."""
    per_word = 32 // bits
    if words.shape[1] * per_word < count:
        raise ValueError(f"{count} codes of {bits} bits take {-(-count // per_word)} words, got {words.shape[1]}")
    out = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
    for i in range(per_word):
        out[..., i] = (words >> (i * bits)).bitwise_and_(2**bits - 1)
    return out.flatten(1)[:, :count].contiguous()

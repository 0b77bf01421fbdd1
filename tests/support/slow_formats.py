"""Packing rules written a second time, code by code over Python integers, to hold the fast ones against.

Codes q are lists of rows; a stream is a list of unsigned 32-bit words. Checkpoints are made with them, never with the
packers of the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def stream(codes: list[int], bits: int) -> list[int]:
    """Dense little-endian words of the codes."""
    total = 0
    for i, code in enumerate(codes):
        total |= int(code) << (i * bits)
    count = (len(codes) * bits + 31) // 32
    return [(total >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


def padded_words(codes: list[int], bits: int) -> list[int]:
    """floor(32 / bits) codes to a word."""
    per = 32 // bits
    return [sum(int(c) << (bits * i) for i, c in enumerate(codes[k : k + per])) for k in range(0, len(codes), per)]


def plane_words(codes: list[int], bits: int) -> list[int]:
    """Split planes: per 32 codes, the low 2 (3 bit) or 4 bits of all, then the next ones, powers of two wide."""
    widths = {3: [2, 1], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}.get(bits, [bits])
    words = []
    for k in range(0, len(codes), 32):
        low = 0
        for width in widths:
            words += stream([(int(c) >> low) % 2**width for c in codes[k : k + 32]], width)
            low += width
    return words


def matrix(rows: list[list[int]]) -> torch.Tensor:
    """Rows of unsigned words as an int32 tensor of the same bits."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def dequantized(q: torch.Tensor, z: torch.Tensor, s: torch.Tensor, g_idx: list[int]) -> torch.Tensor:
    """float32 [N, K]: (q - z) * s, element by element in float64, rounded once to the dtype of s."""
    exact = np.zeros(q.shape)
    qs, zs, ss = q.numpy().astype(int), z.numpy().astype(int), s.double().numpy()
    for k, g in enumerate(g_idx):
        exact[:, k] = (qs[:, k] - zs[:, g]) * ss[:, g]
    return torch.from_numpy(exact).to(s.dtype).float()


def gptq_tensors(
    q: torch.Tensor,
    z: torch.Tensor,
    s: torch.Tensor,
    bits: int,
    *,
    g_idx: list[int] | None,
    v2: bool,
    planar: bool = False,
) -> dict[str, torch.Tensor]:
    """GPTQ's tensors; v1's one is taken code by code, modulo the code's width, unless fields fill words (then by
    word)."""
    pack = plane_words if planar else stream
    columns = [pack(row, bits) for row in q.tolist()]
    zero_rows = [pack(row, bits) for row in z.t().tolist()]
    if not v2:
        if bits in (2, 4, 8):
            ones = sum(1 << i for i in range(0, 32, bits))
            zero_rows = [[(word - ones) % 2**32 for word in row] for row in zero_rows]
        else:
            zero_rows = [pack([(c - 1) % 2**bits for c in row], bits) for row in z.t().tolist()]
    tensors = {"qweight": matrix(columns).t(), "qzeros": matrix(zero_rows), "scales": s.t()}
    if g_idx is not None:
        tensors["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def awq_gemm_tensors(q: torch.Tensor, z: torch.Tensor, s: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """AWQ gemm: 4 bit in nibbles 0,2,4,6,1,3,5,7 of each eight, other widths in natural order along N."""

    def pack(row: list[int]) -> list[int]:
        if bits != 4:
            return stream(row, bits)
        return [
            sum(row[8 * c + o] << (4 * i) for i, o in enumerate([0, 2, 4, 6, 1, 3, 5, 7])) for c in range(len(row) // 8)
        ]

    qweight = matrix([pack(row) for row in q.t().tolist()])
    return {"qweight": qweight, "qzeros": matrix([pack(row) for row in z.t().tolist()]), "scales": s.t().contiguous()}


def compressed_tensors(
    q: torch.Tensor,
    z: torch.Tensor | None,
    s: torch.Tensor,
    bits: int,
    *,
    padded: bool = False,
    g_idx: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """pack-quantized; z None is symmetric."""
    pack = padded_words if padded else stream
    tensors = {"weight_packed": matrix([pack(row, bits) for row in q.tolist()]), "weight_scale": s.contiguous()}
    tensors["weight_shape"] = torch.tensor(q.shape)
    if z is not None:
        tensors["weight_zero_point"] = matrix([pack(row, bits) for row in z.t().tolist()]).t().contiguous()
    if g_idx is not None:
        tensors["weight_g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return tensors


def random_layer(
    out_features: int, in_features: int, groups: int, bits: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, z, s) drawn anew; some scales negative, some zero points 0 and 2**bits - 1."""
    q = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    z = torch.randint(0, 2**bits, (out_features, groups))
    z.view(-1)[0], z.view(-1)[-1] = 0, 2**bits - 1
    s = (torch.randn(out_features, groups) * 0.05).to(dtype)
    return q, z, s


def write_checkpoint(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    quant: dict[str, Any] | None = None,
    *,
    config: dict[str, Any] | None = None,
    side_file: str | None = None,
) -> Path:
    """A folder of config.json and model.safetensors; the quantization config goes to `side_file` if that is named."""
    folder.mkdir(parents=True, exist_ok=True)
    full: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **(config or {})}
    if quant is not None and side_file is None:
        full["quantization_config"] = quant
    elif quant is not None and side_file is not None:
        (folder / side_file).write_text(json.dumps(quant))
    (folder / "config.json").write_text(json.dumps(full))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def prefixed(module: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensor names with the module's in front."""
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}

"""The rotation of queries and keys before keys are quantized to 4 bits, in plain torch.

Each half of a head, of n = D/2 elements, is multiplied by an orthonormal matrix R_j, the same for queries and keys,
which leaves q . k as it is:

    R_j = M P_j    M: Sylvester's Hadamard matrix on runs of B elements, B the largest power of two that divides n
                   P_j: the reflection that takes M e_j to (1, ..., 1) / sqrt(n)

M spreads the outliers of a head over its elements, so that they share one scale. What element j of a half held becomes
the mean of the rotated half, which an offset of its own holds in float16, exactly. Models with rotary embeddings put
much of the energy of a head's keys and queries into one pair of elements (j, j + D/2): a third to a half of it in
SmolLM2. With that pair's j, the axis, 4 bits are spent on the rest alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch


def hadamard_block(head_dim: int) -> int:
    """B: the largest power of two that divides half a head."""
    half = head_dim // 2
    return half & -half


@lru_cache(maxsize=1024)
def half_rotation(head_dim: int, axis: int) -> torch.Tensor:
    """R_j of the axis, float32 [D/2, D/2] on the CPU; a half [..., D/2] is rotated by `half @ R_j`."""
    size, block = head_dim // 2, hadamard_block(head_dim)
    if not 0 <= axis < size:
        raise ValueError(f"kv cache: axis={axis} is outside half a head of {size} elements")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    matrix = torch.kron(torch.eye(size // block, dtype=torch.float64), matrix) * block**-0.5
    away = matrix[axis] - size**-0.5
    length = away @ away
    if length > 1e-9:
        matrix = matrix - torch.outer(matrix @ away, away) * (2.0 / length)
    return matrix.float()


def rotate_heads(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] float32, rotated; axes int32 [Hkv] with each serving heads / Hkv neighbouring heads."""
    size, each = x.shape[-1], x.shape[1] // axes.shape[0]
    matrices = torch.stack([half_rotation(size, axis) for axis in axes.tolist()]).to(x.device)
    halves = x.unflatten(-1, (2, -1)).unflatten(1, (-1, each))
    return torch.einsum("tkghd,kde->tkghe", halves, matrices).flatten(1, 2).flatten(-2)


def choose_axes(energy: torch.Tensor) -> torch.Tensor:
    """int32 [..., Hkv]: the pair with the most energy. energy [..., Hkv, D]: mean squares of keys after rotary."""
    return energy.unflatten(-1, (2, -1)).sum(-2).argmax(-1).int()

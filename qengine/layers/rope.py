"""Rotary position embeddings: what one is (RopeSpec) and the angles of a batch of tokens (Rope)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.kernels.fused.ref import rotary_angles
from qengine.layers.rope_frequencies import Frequencies, rope_frequencies


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    kind: default, linear, dynamic, yarn, longrope or llama3 (transformers' `rope_type`). theta: the base.
    rotary_dim: leading dimensions of a head that rotate (partial rotary). interleaved: pairs are (0,1), (2,3), ...
    (GLM) instead of (i, i + rotary_dim/2). params: what the kind needs besides, under transformers' names, with
    `max_position_embeddings` and `original_max_position_embeddings` filled in.
    """

    kind: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def switch_length(self) -> int | None:
        """Longest sequence that longrope rotates with its short factors; None for the other kinds."""
        return int(self.params["original_max_position_embeddings"]) if self.kind == "longrope" else None

    @property
    def needs_lengths(self) -> bool:
        """Whether the angles depend on the sequence's length, not on the position alone."""
        return self.kind in ("longrope", "dynamic")


@dataclass(frozen=True)
class Rotary:
    """Angles of T tokens: cos and signed sin [T, 1, rotary_dim]; out = x * cos + swap(x) * sin."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


class Rope:
    """Computes a Rotary once a step for all layers that share its RopeSpec.

    longrope and dynamic depend on the length of the token's sequence: the number of tokens it will have after this
    step, or its whole prompt if that is longer (a prompt that comes in chunks). Each sequence of a batch is judged by
    its own length. transformers judges a call by its longest position, so both agree for a prompt given at once, and
    for decode steps. A sequence that grows over longrope's switch length keeps keys rotated by short factors in its
    cache; transformers computes the cache anew there, and so must whoever owns the cache (RopeSpec.switch_length).
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self._frequencies: Frequencies = rope_frequencies(spec.kind, spec.theta, spec.rotary_dim, spec.params)
        self._short = self._frequencies.base.to(device)
        self._long = None if self._frequencies.long is None else self._frequencies.long.to(device)
        self._factor = self._frequencies.attention_factor

    def rotary(self, positions: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype) -> Rotary:
        """Angles for int64 positions [T]. lengths: int64 [T], needed where `spec.needs_lengths`."""
        if positions.is_cuda:
            from qengine.kernels.fused import ops

            interleaved = self.spec.interleaved
            cos, sin = ops.rotary_angles(positions, self._inverse(lengths), self._factor, dtype, interleaved)
            return Rotary(cos, sin, interleaved)
        cos, sin = rotary_angles(positions, self._inverse(lengths), self._factor, dtype, self.spec.interleaved)
        return Rotary(cos, sin, self.spec.interleaved)

    def _inverse(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """Inverse frequencies [rotary_dim/2], or [T, rotary_dim/2] where they depend on the length."""
        if not self.spec.needs_lengths:
            return self._short
        assert lengths is not None, f"{self.spec.kind} rope needs the lengths of the sequences"
        if self._long is not None:
            is_long = lengths > int(self.spec.params["original_max_position_embeddings"])
            return torch.where(is_long[:, None], self._long, self._short)
        distinct, which = torch.unique(lengths, return_inverse=True)
        rows = [self._frequencies.at_length(int(length)) for length in distinct.tolist()]
        return torch.stack(rows).to(lengths.device)[which]

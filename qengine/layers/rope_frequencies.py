"""Inverse frequencies of every kind of rotary embedding, in float32.

Sources: RoFormer (arXiv 2104.09864); linear: position interpolation (2306.15595); dynamic: NTK-aware scaling by
sequence length; yarn: YaRN (2309.00071); longrope: LongRoPE (2402.13753); llama3: the Llama 3.1 release. Where the
papers leave a choice, transformers' is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Frequencies:
    """base: inverse frequencies [dim/2]. long: those of longrope's long regime. attention_factor multiplies cos, sin.

    at_length: inverse frequencies for a sequence of that many tokens (dynamic).
    """

    base: torch.Tensor
    at_length: Callable[[int], torch.Tensor]
    attention_factor: float = 1.0
    long: torch.Tensor | None = None


def rope_frequencies(kind: str, theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    """Frequencies for `dim` rotating dimensions. params: checked by whoever read the config."""
    build = _BUILDERS[kind]
    return build(theta, dim, params)


def _powers(theta: float, dim: int) -> torch.Tensor:
    """theta ** (2i / dim) for i in 0 .. dim/2 - 1."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _constant(base: torch.Tensor, attention_factor: float = 1.0) -> Frequencies:
    return Frequencies(base, lambda length: base, attention_factor)


def _default(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    return _constant(1.0 / _powers(theta, dim))


def _linear(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    return _constant(1.0 / _powers(theta, dim) / params["factor"])


def _dynamic(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    """theta * (factor * length / max - (factor - 1)) ** (dim / (dim - 2)) for lengths over max."""
    factor, limit = params["factor"], params["max_position_embeddings"]

    def at_length(length: int) -> torch.Tensor:
        stretch = (factor * max(length, limit) / limit - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / _powers(theta * stretch, dim)

    return Frequencies(at_length(limit), at_length)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    """Divided by `factor` under beta_slow turns in the original context, untouched over beta_fast, a ramp between."""
    factor, original = params["factor"], params["original_max_position_embeddings"]
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(theta, dim)
    keep = 1 - ramp
    return _constant(1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, attention_factor)


def _longrope(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    """Each frequency has its own divisor, one list for sequences up to the original context and one beyond."""
    original = params["original_max_position_embeddings"]
    factor = params.get("factor") or params["max_position_embeddings"] / original
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    powers = _powers(theta, dim)
    short = 1.0 / (torch.tensor(params["short_factor"], dtype=torch.float32) * powers)
    long = 1.0 / (torch.tensor(params["long_factor"], dtype=torch.float32) * powers)
    return Frequencies(short, lambda length: long if length > original else short, attention_factor, long)


def _llama3(theta: float, dim: int, params: dict[str, Any]) -> Frequencies:
    """Waves over original/low_freq_factor are stretched, under original/high_freq_factor kept, a blend between."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    original = params["original_max_position_embeddings"]
    base = 1.0 / _powers(theta, dim)
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(wavelength > original / low, base / factor, blended)
    return _constant(torch.where(wavelength < original / high, base, scaled))


_BUILDERS: dict[str, Callable[[float, int, dict[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}

ROPE_KINDS = tuple(_BUILDERS)

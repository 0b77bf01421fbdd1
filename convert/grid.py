"""Scales, zero points and codes of groups of weights: the arithmetic that all methods share.

A group is a row of the last dimension. Scales come out as values that float16 holds exactly, finite, normal and not
zero; codes are always computed with the rounded scale, so a file holds what the search saw.
"""

from __future__ import annotations

import torch

from qengine.convert.scheme import Scheme

FP16_MAX = 65504.0
FP16_MIN_NORMAL = 2.0**-14
# Fractions of the full range that the range search tries; below a half, clipping never won on the models measured.
SHRINK = tuple(1.0 - i / 40 for i in range(20))


def round_scale(scale: torch.Tensor, scheme: Scheme, down: bool = False) -> torch.Tensor:
    """`scale` with `scheme.scale_bits` significant bits, within float16's normal range. down: never above the input."""
    steps = float(1 << scheme.scale_bits)
    mantissa, exponent = torch.frexp(scale.clamp(FP16_MIN_NORMAL, FP16_MAX))
    scaled = mantissa * steps
    mantissa = (scaled.floor() if down else scaled.round()) / steps
    return torch.ldexp(mantissa, exponent).clamp_min(FP16_MIN_NORMAL)


def fit_range(low: torch.Tensor, high: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) of grids that cover [low, high], both of the inputs' shape and dtype, zeros whole numbers.

    Asymmetric: low <= 0 <= high is enforced, so that zero is on the grid. Symmetric: the larger magnitude sits half a
    step beyond the positive end, as GPTQ's symmetric grid has it.
    """
    low, high = low.clamp(-FP16_MAX, 0), high.clamp(0, FP16_MAX)
    top = scheme.max_code
    if scheme.sym:
        scale = round_scale(torch.maximum(-low, high) / (scheme.mid - 0.5), scheme)
        zero = torch.full_like(scale, float(scheme.mid))
    else:
        if scheme.min_zero > 0:  # leave room below zero, or a zero point of at least min_zero would cut off the top
            low = torch.minimum(low, -high * (scheme.min_zero / (top - scheme.min_zero)))
        scale = round_scale((high - low) / top, scheme)
        zero = (-low / scale).round().clamp(scheme.min_zero, top)
    # The outermost grid point must be a finite float16 too.
    limit = round_scale(FP16_MAX / torch.maximum(zero, top - zero), scheme, down=True)
    return torch.minimum(scale, limit), zero


def to_codes(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes as whole numbers in the weight's dtype; scales and zeros broadcast against it."""
    return (weight / scales).round_().add_(zeros).clamp_(0, scheme.max_code)


def fake_quantize(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The weight as its codes give it back."""
    return to_codes(weight, scales, zeros, scheme).sub_(zeros).mul_(scales)


def minmax_grid(groups: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) [..., 1] that cover each group's extremes; groups [..., g]."""
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    return fit_range(low, high, scheme)


def search_grid(
    groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None, shrink: tuple[float, ...] = SHRINK
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) [..., 1] of the shrunken range with the least squared error, weighted by column importance.

    groups [..., g]; importance broadcasts against it (the mean squared activation of each column), None for equal.
    """
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    best_error: torch.Tensor | None = None
    scales = zeros = low
    for fraction in shrink:
        s, z = fit_range(low * fraction, high * fraction, scheme)
        error = fake_quantize(groups, s, z, scheme).sub_(groups).square_()
        if importance is not None:
            error.mul_(importance)
        total = error.sum(-1, keepdim=True)
        if best_error is None:
            best_error, scales, zeros = total, s, z
            continue
        better = total < best_error
        best_error = torch.where(better, total, best_error)
        scales, zeros = torch.where(better, s, scales), torch.where(better, z, zeros)
    return scales, zeros


def split_groups(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """[N, K] -> [N, G, g], a view where it can be."""
    return weight.reshape(weight.shape[0], -1, scheme.group(weight.shape[1]))

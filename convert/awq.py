"""AWQ (Lin et al., arXiv 2306.00978): scale the input channels that matter before rounding, then clip ranges.

For a set of linears that share an input, x W^T = (x / s) (W s)^T for any positive s. With s larger where the input is
large, the weights that meet large inputs lose less to rounding; the division is folded into the producer of x. The
search minimizes the output error on the calibration data, for which the second moment H = mean x x^T is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.convert.grid import fake_quantize, fit_range, search_grid, split_groups, to_codes
from qengine.convert.rtn import assemble
from qengine.convert.scheme import Scheme
from qengine.convert.stats import output_error
from qengine.quant.weights import QuantizedWeight

COARSE = (0, 20, 40, 60, 80, 100)  # per cent
# Output rows that the search looks at, evenly spread: more change the choice little and cost in proportion.
MAX_ROWS = 1024
# Fractions of a group's range that a candidate is judged by: what clips well may scale otherwise than what does not.
JUDGED_BY = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
# Added to the second moment's diagonal, as a share of it: the products between columns are those of one text, and a
# search that trusts them less finds scales and ranges that serve other texts better.
DISTRUST = 1.0
CLIP_STEPS = tuple(1.0 - i / 20 for i in range(11))


@dataclass(frozen=True)
class ScaleChoice:
    """Input scales [K] float32 of linears that share an input; output error of the searched rows with and without."""

    scales: torch.Tensor
    ratio: float
    duo: bool
    loss: float
    plain_loss: float


def weight_profile(weights: list[torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """[K]: mean over all rows of |w| relative to the largest |w| of its group."""
    total, rows = torch.zeros_like(weights[0][0]), 0
    for weight in weights:
        groups = split_groups(weight.abs(), scheme)
        total += (groups / groups.amax(-1, keepdim=True).clamp_min(1e-12)).sum(0).reshape(-1)
        rows += weight.shape[0]
    return total / rows


def candidate_scales(magnitude: torch.Tensor, profile: torch.Tensor, ratio: float, duo: bool) -> torch.Tensor:
    """s = magnitude^ratio, divided by profile^(1 - ratio) with `duo`; centred so that max * min = 1."""
    scales = magnitude.clamp_min(1e-4).pow(ratio)
    if duo:
        scales = scales / (profile.pow(1 - ratio) + 1e-4)
    scales = scales.clamp_min(1e-4)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return scales.clamp(1e-3, 1e3)


def search_scales(
    weights: list[torch.Tensor],
    second_moment: torch.Tensor,
    magnitude: torch.Tensor,
    scheme: Scheme,
    *,
    share: torch.Tensor | None = None,
    distrust: float = DISTRUST,
) -> ScaleChoice:
    """Find input scales for linears `weights` ([N_i, K] each) that share one input.

    second_moment [K, K], magnitude [K] = mean |x|. share: int64 [K], columns with the same number must get the same
    scale (the heads of a grouped-query attention that read one value head); their statistics are averaged.
    """
    profile = weight_profile(weights, scheme)
    if share is not None:
        magnitude, profile = _average(magnitude, share), _average(profile, share)
    stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
    stacked = stacked[:: -(-stacked.shape[0] // MAX_ROWS)]
    importance = second_moment.diagonal().clamp_min(0)
    second_moment = second_moment.clone()
    second_moment.diagonal().mul_(1 + distrust)
    seen: dict[tuple[int, bool], tuple[float, torch.Tensor]] = {}

    def loss_at(percent: int, duo: bool) -> float:
        key = (percent, duo)
        if key not in seen:
            scales = candidate_scales(magnitude, profile, percent / 100, duo)
            delta = rounded(stacked * scales, scheme, importance / scales.square()) / scales - stacked
            seen[key] = (float(output_error(delta, second_moment)), scales)
        return seen[key][0]

    plain = loss_at(0, False)
    for duo in (False, True):
        losses = {percent: loss_at(percent, duo) for percent in COARSE}
        best = min(losses, key=lambda percent: losses[percent])
        for offset in (-10, 10, -5, 5):
            if 0 <= best + offset <= 100:
                loss_at(best + offset, duo)
    (percent, duo), (loss, scales) = min(seen.items(), key=lambda item: item[1][0])
    return ScaleChoice(scales, percent / 100, duo, loss, plain)


def rounded(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor) -> torch.Tensor:
    """`weight` [N, K] rounded in each group's range of least squared error, weighted by `importance` [K]."""
    groups = split_groups(weight, scheme)
    scales, zeros = search_grid(groups, scheme, importance.reshape(groups.shape[1:]), JUDGED_BY)
    return fake_quantize(groups, scales, zeros, scheme).reshape(weight.shape)


def _average(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    count = int(share.max()) + 1
    sums = values.new_zeros(count).index_add_(0, share, values)
    sizes = values.new_zeros(count).index_add_(0, share, torch.ones_like(values))
    return (sums / sizes)[share]


def quantize_clipped(
    weight: torch.Tensor,
    second_moment: torch.Tensor,
    scheme: Scheme,
    *,
    steps: tuple[float, ...] = CLIP_STEPS,
    distrust: float = DISTRUST,
) -> QuantizedWeight:
    """Round `weight` [N, K], each group's range shrunk to the fraction with the least output error of that group.

    second_moment [K, K] of the (scaled) input. The error of a group counts its own columns only: d H_gg d^T. steps: the
    fractions tried; (1.0,) clips nothing.
    """
    groups = split_groups(weight, scheme)
    count, size = groups.shape[1], groups.shape[2]
    diagonal = torch.stack([second_moment[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
    diagonal.diagonal(dim1=1, dim2=2).mul_(1 + distrust)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    best: torch.Tensor | None = None
    scales = zeros = low
    for fraction in steps:
        s, z = fit_range(low * fraction, high * fraction, scheme)
        delta = (fake_quantize(groups, s, z, scheme) - groups).transpose(0, 1)
        error = ((delta @ diagonal) * delta).sum(-1).T.unsqueeze(-1)
        if best is None:
            best, scales, zeros = error, s, z
            continue
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, s, scales), torch.where(better, z, zeros)
    codes = to_codes(groups, scales, zeros, scheme).reshape(weight.shape)
    return assemble(codes, scales.squeeze(-1), zeros.squeeze(-1), scheme)

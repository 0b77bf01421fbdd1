"""Weights that make up for what quantizing the layers before has done to their inputs.

A linear sees x where the source's sees x_ref. Of all W', W x_ref is met best, in the mean square, by
W + W C H^-1 with H = mean x x^T and C = mean (x_ref - x) x^T; rounding then aims at it instead of W. (The asymmetric
calibration of GPTAQ, arXiv 2504.02692, in closed form.)
"""

from __future__ import annotations

import torch

from qengine.convert.stats import InputStats

DAMP = 0.1
"""Share of the mean diagonal added to H: C is estimated on a sample, and directions hardly seen must not be trusted."""


def corrected(weights: list[torch.Tensor], stats: InputStats, damp: float | None = None) -> list[torch.Tensor]:
    """The target of rounding for each of `weights` ([N_i, K], float32), which read one input. Without a reference in
    the statistics, or where H cannot be factored, the weights themselves. damp: None is DAMP, and more where there were
    fewer than ten rows a column."""
    cross = stats.cross_moment()
    if cross is None:
        return weights
    if damp is None:
        damp = max(DAMP, cross.shape[0] / stats.rows)
    moment = stats.second_moment()
    moment.diagonal().add_(damp * moment.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(moment)
    del moment
    if int(info):
        return weights
    shifts = [torch.cholesky_solve((weight @ cross).T, lower).T for weight in weights]
    if not all(bool(torch.isfinite(shift).all()) for shift in shifts):
        return weights
    return [weight + shift for weight, shift in zip(weights, shifts, strict=True)]

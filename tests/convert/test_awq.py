import pytest
import torch

from qengine.convert.awq import candidate_scales, quantize_clipped, rounded, search_scales, weight_profile
from qengine.convert.rtn import round_trip
from qengine.convert.scheme import Scheme

SCHEME = Scheme(4, 32, False)


def problem(seed, shapes=((40, 96), (24, 96)), rows=400):
    g = torch.Generator().manual_seed(seed)
    k = shapes[0][1]
    x = torch.randn(rows, k, generator=g) * torch.rand(k, generator=g).mul(4).exp() * 0.1
    return [torch.randn(*shape, generator=g) * 0.05 for shape in shapes], x, x.T @ x / rows, x.abs().mean(0)


def direct_error(weights, x, scales):
    """The output error with the scaled, rounded weights, from the data itself."""
    total = 0.0
    for w in weights:
        near = rounded(w * scales, SCHEME, (x / scales).square().mean(0))
        total += float(((x / scales) @ near.T - x @ w.T).double().square().sum(1).mean())
    return total


@pytest.mark.parametrize("seed", range(3))
def test_objective_is_the_output_error(seed):
    weights, x, moment, magnitude = problem(seed)
    choice = search_scales(weights, moment, magnitude, SCHEME, distrust=0.0)
    assert choice.loss == pytest.approx(direct_error(weights, x, choice.scales), rel=1e-3)
    assert choice.plain_loss == pytest.approx(direct_error(weights, x, torch.ones(96)), rel=1e-3)
    assert choice.loss < 0.9 * choice.plain_loss
    # near the best of the full grid that the paper searches
    profile = weight_profile(weights, SCHEME)
    grid = [candidate_scales(magnitude, profile, r / 20, duo) for r in range(21) for duo in (False, True)]
    assert choice.loss <= 1.03 * min(direct_error(weights, x, s) for s in grid)


def test_shared_columns_get_one_scale():
    weights, _, moment, magnitude = problem(4, shapes=((40, 96),))
    share = torch.arange(32).reshape(2, 1, 16).expand(2, 3, 16).reshape(-1)
    choice = search_scales(weights, moment, magnitude, SCHEME, share=share)
    for number in range(32):
        assert choice.scales[share == number].unique().numel() == 1
    assert choice.loss <= choice.plain_loss
    assert choice.ratio > 0


def test_clipping_lowers_the_error_of_each_group():
    g = torch.Generator().manual_seed(5)
    w = torch.randn(30, 96, generator=g)
    x = torch.randn(500, 96, generator=g)
    moment = x.T @ x / 500
    clipped = quantize_clipped(w, moment, SCHEME, distrust=0.0).dequantize() - w
    plain = round_trip(w, SCHEME) - w
    for start in range(0, 96, 32):
        part = slice(start, start + 32)
        a, b = ((x[:, part] @ d[:, part].T).square().mean(0) for d in (clipped, plain))
        assert bool((a <= b * (1 + 1e-4) + 1e-9).all())
        assert a.sum() < 0.97 * b.sum()


def test_scales_stay_in_bounds_for_dead_and_huge_channels():
    weights, _, moment, magnitude = problem(6)
    magnitude[3], magnitude[7] = 0.0, 1e6
    moment[3], moment[:, 3] = 0, 0
    moment[7, 7] = 1e12
    choice = search_scales(weights, moment, magnitude, SCHEME, distrust=0.0)
    assert bool(torch.isfinite(choice.scales).all())
    assert float(choice.scales.min()) >= 1e-3
    assert float(choice.scales.max()) <= 1e3

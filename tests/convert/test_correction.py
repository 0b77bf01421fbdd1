"""Rounding aims at the source's outputs on the quantized model's inputs, and `best` judges on rows held out."""

import pytest
import torch

from qengine.convert.correction import corrected
from qengine.convert.gptq import GPTQSettings
from qengine.convert.layer_result import LayerResult
from qengine.convert.quantize_layer import LayerInput, quantize_stage
from qengine.convert.scheme import Scheme
from qengine.convert.stats import InputStats, SplitStats, model_error, output_error


def inputs(rows, width, seed, shift=0.3):
    """(x, x_ref): correlated columns, and a disturbance that is partly a linear function of x."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g) / width**0.5
    x = torch.randn(rows, width, generator=g) @ (mix + torch.eye(width))
    noise = torch.randn(rows, width, generator=g) * 0.05
    return x, x + shift * x @ torch.randn(width, width, generator=g) / width**0.5 + noise


def test_it_is_the_least_squares_solution():
    x, reference = inputs(600, 48, 1)
    weights = [torch.randn(n, 48, generator=torch.Generator().manual_seed(n)) for n in (20, 7)]
    stats = InputStats()
    for rows in (slice(0, 100), slice(100, None)):
        stats(x[rows], reference[rows])
    for weight, target in zip(weights, corrected(weights, stats, damp=0.0), strict=True):
        best = torch.linalg.lstsq(x, reference @ weight.T).solution.T
        torch.testing.assert_close(target, best, rtol=1e-3, atol=1e-3)
        damped = corrected([weight], stats)[0]
        far, near = (((x @ w.T - reference @ weight.T) ** 2).mean() for w in (weight, damped))
        assert near < 0.2 * far


def test_without_a_shift_weights_stay():
    x, _ = inputs(300, 32, 2)
    weight = torch.randn(5, 32)
    alone, same = InputStats(), InputStats()
    alone(x)
    same(x, x)
    assert corrected([weight], alone)[0] is weight
    torch.testing.assert_close(corrected([weight], same)[0], weight)


def test_the_error_is_counted_as_the_data_has_it():
    x, reference = inputs(400, 24, 3)
    weight, delta = torch.randn(6, 24), torch.randn(6, 24) * 0.1
    stats = InputStats()
    stats(x, reference)

    def direct(changed):
        return (x @ changed.T - reference @ weight.T).square().sum(1).mean()

    got = model_error(delta, weight, stats.second_moment(), stats.cross_moment())
    torch.testing.assert_close(got, direct(weight + delta) - direct(weight), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        model_error(delta, weight, stats.second_moment(), None), output_error(delta, stats.second_moment())
    )


def test_split_rows_and_together():
    x, reference = inputs(90, 16, 4)
    split, whole = SplitStats(True), InputStats()
    split.add(x[:50], reference[:50], 60)
    split.add(x[50:], reference[50:], 10)
    whole(x, reference)
    assert (split.fit.rows, split.held.rows) == (60, 30)
    for name in ("second_moment", "cross_moment", "mean_magnitude"):
        torch.testing.assert_close(getattr(split.all_rows(), name)(), getattr(whole, name)())
    assert split.usable
    split.add(torch.full((1, 16), torch.nan), None, 1)
    assert not split.usable


@pytest.mark.parametrize(("same", "expected"), [(True, "gptq"), (False, "awq")])
def test_best_judges_by_the_rows_held_out(same, expected):
    """GPTQ fitted to rows unlike those held out loses to clipping; fitted to such as these it wins."""
    g = torch.Generator().manual_seed(5)
    mix = torch.randn(64, 64, generator=g) / 8
    other = torch.randn(64, 64, generator=g) / 8
    fit = torch.randn(400, 64, generator=g) @ mix
    held = torch.randn(400, 64, generator=g) @ (mix if same else other)
    stats = SplitStats(True)
    stats.add(torch.cat([fit, held]), torch.cat([fit, held]), 400)
    layer = LayerInput("l", {"a": torch.randn(24, 64, generator=g)}, {"a": Scheme(3, 32, False)}, lambda _: None)
    result = LayerResult()
    quantize_stage(layer, ("a",), stats, "best", GPTQSettings(order="static", distrust=0.0), result)
    assert result.records[0].method == expected

import pytest
import torch

from qengine.convert.gptq import FactorizationError, GPTQSettings, column_order, inverse_factor, quantize_gptq
from qengine.convert.grid import fit_range
from qengine.convert.rtn import quantize_rtn
from qengine.convert.scheme import Scheme
from qengine.convert.stats import InputStats, output_error


def problem(n, k, rows, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g, dtype=dtype) / k**0.5 + torch.eye(k, dtype=dtype)
    x = (torch.randn(rows, k, generator=g, dtype=dtype) * torch.rand(k, generator=g, dtype=dtype).mul(3).exp()) @ mix
    return torch.randn(n, k, generator=g, dtype=dtype) * 0.05, x.T @ x / rows


def plain_gptq(w, h, scheme, damp, perm, group_of, static):
    """The paper's algorithm, one column after the other, with the inverse of what is left of H at every step."""
    n, k = w.shape
    w, h = w.clone(), h.clone()
    group = scheme.group(k)
    original = w.clone()
    h = h + torch.eye(k, dtype=h.dtype) * damp * h.diagonal().mean()
    q = torch.zeros_like(w)
    scales, zeros = torch.zeros(n, k // group, dtype=w.dtype), torch.zeros(n, k // group, dtype=w.dtype)
    done = set()
    left = perm.tolist()
    for at, column in enumerate(perm.tolist()):
        gi = int(group_of[at])
        if gi not in done:
            members = [c for a, c in enumerate(perm.tolist()) if int(group_of[a]) == gi]
            values = (original if static else w)[:, members]
            s, z = fit_range(values.amin(1), values.amax(1), scheme)
            scales[:, gi], zeros[:, gi] = s, z
            done.add(gi)
        s, z = scales[:, gi], zeros[:, gi]
        code = ((w[:, column] / s).round() + z).clamp(0, scheme.max_code)
        q[:, column] = code
        inverse = torch.linalg.inv(h[left][:, left])
        error = (w[:, column] - (code - z) * s) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0][None, :]
        left = left[1:]
    return q, scales, zeros


@pytest.mark.parametrize("order", ["plain", "static", "act", "grouped"])
@pytest.mark.parametrize(("k", "group", "bits", "sym"), [(96, 16, 4, False), (200, 100, 3, True), (160, -1, 4, False)])
def test_equals_the_plain_algorithm(order, k, group, bits, sym):
    scheme = Scheme(bits, group, sym)
    w, h = problem(7, k, 3 * k, seed=k + bits)
    size = scheme.group(k)
    perm = column_order(h.diagonal(), size, order)
    group_of = torch.arange(k) // size if order == "act" else perm // size
    q, s, z = plain_gptq(w, h, scheme, 0.01, perm, group_of, static=order == "static")
    got = quantize_gptq(w, h, scheme, GPTQSettings(damp=0.01, distrust=0, order=order, search=False))
    assert torch.equal(got.q, q.to(torch.uint8))
    assert torch.equal(got.scales.double(), s)
    assert torch.equal(got.zeros.double(), z)
    if order == "act" and group != -1:
        assert got.g_idx is not None
        assert torch.equal(got.g_idx[perm].long(), group_of)
        assert not torch.equal(got.g_idx.long(), torch.arange(k) // size)
    else:
        assert got.g_idx is None


@pytest.mark.parametrize("order", ["plain", "static", "act", "grouped"])
@pytest.mark.parametrize("group", [32, 96, 128, 192, 384])
def test_blocks_change_nothing_and_beat_rounding(order, group, monkeypatch):
    w, h = problem(9, 384, 1000, seed=group)
    scheme = Scheme(4, group, False)
    settings = GPTQSettings(order=order)
    got = quantize_gptq(w, h, scheme, settings)
    monkeypatch.setattr("qengine.convert.gptq._block_size", lambda group: 384)
    whole = quantize_gptq(w, h, scheme, settings)
    assert torch.equal(got.q, whole.q)
    assert torch.equal(got.scales, whole.scales)
    rounded = quantize_rtn(w, scheme)
    error, plain = (output_error(m.dequantize().double() - w, h) for m in (got, rounded))
    assert error < 0.8 * plain


def test_rows_do_not_depend_on_each_other():
    w, h = problem(12, 128, 500, seed=5, dtype=torch.float32)
    scheme, settings = Scheme(4, 64, True), GPTQSettings(order="static")
    whole = quantize_gptq(w, h, scheme, settings)
    part = quantize_gptq(w[4:9], h, scheme, settings)
    assert (whole.q[4:9] != part.q).float().mean() < 0.01  # float32 products of other sizes may round otherwise


def test_dead_columns_become_zero():
    w, h = problem(6, 64, 300, seed=6)
    for column in (0, 17, 63):
        h[column], h[:, column] = 0, 0
    got = quantize_gptq(w, h, Scheme(4, 32, False), GPTQSettings()).dequantize()
    assert bool((got[:, [0, 17, 63]] == 0).all())
    assert bool((got[:, 1:17] != 0).any())


def test_damping_is_raised_until_it_factors():
    _, h = problem(2, 32, 300, seed=7)
    low = h.clone()
    eigenvalues, vectors = torch.linalg.eigh(h)
    eigenvalues[0] = -0.05 * h.diagonal().mean()
    low = vectors @ torch.diag(eigenvalues) @ vectors.T
    _, damp = inverse_factor(low.clone, 0.01)
    assert damp == pytest.approx(0.1)
    upper, damp = inverse_factor(h.clone, 0.01)
    assert damp == 0.01
    damped = h + torch.eye(32) * 0.01 * h.diagonal().mean()
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(damped))
    with pytest.raises(FactorizationError, match="could not be factored"):
        inverse_factor(lambda: -h, 0.01)


def test_few_rows_still_work():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(5, 128, generator=g)
    w = torch.randn(6, 128, generator=g)
    got = quantize_gptq(w, x.T @ x / 5, Scheme(4, 64, False), GPTQSettings()).dequantize()
    rounded = quantize_rtn(w, Scheme(4, 64, False)).dequantize()
    assert ((got - w) @ x.T).square().sum() < 0.2 * ((rounded - w) @ x.T).square().sum()


def test_stats_equal_direct_sums_and_see_bad_rows():
    g = torch.Generator().manual_seed(9)
    x = torch.randn(50, 24, generator=g)
    stats = InputStats()
    stats(x[:20])
    stats(x[20:].reshape(2, 15, 24))
    torch.testing.assert_close(stats.second_moment(), x.T @ x / 50)
    torch.testing.assert_close(stats.mean_magnitude(), x.abs().mean(0))
    assert stats.usable
    delta = torch.randn(7, 24, generator=g)
    torch.testing.assert_close(output_error(delta, stats.second_moment()), (x @ delta.T).square().sum(1).mean())
    bad = x[:4].clone()
    bad[1, 3], bad[2, 0] = float("nan"), float("inf")
    stats(bad)
    assert not stats.usable
    assert stats.bad_rows == 2
    assert bool(torch.isfinite(stats.second_moment()).all())

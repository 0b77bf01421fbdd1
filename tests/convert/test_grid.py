import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.convert.grid import FP16_MAX, FP16_MIN_NORMAL, fake_quantize, minmax_grid, search_grid, to_codes
from qengine.convert.rtn import quantize_rtn
from qengine.convert.scheme import Scheme, fit_group

SCHEMES = [Scheme(b, 32, s, z) for b in (2, 3, 4, 8) for s in (True, False) for z in (0, 1)]


def groups_of_every_kind(seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(24, 3, 32, generator=g)
    w[0] = 0
    w[1] = 0.037
    w[2] = -5.25
    w[3] *= 1e6
    w[4] *= 1e-9
    w[5] = w[5].abs() * 70000
    w[6] = -w[6].abs()
    w[7] = w[7].abs()
    w[8, :, 0] = 3000.0
    return w


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("search", [False, True])
def test_scales_are_float16_numbers_and_products_are_exact(scheme, search):
    w = groups_of_every_kind(scheme.bits)
    scales, zeros = (search_grid if search else minmax_grid)(w, scheme)
    assert torch.equal(scales.half().float(), scales)
    assert bool(torch.isfinite(scales).all())
    assert float(scales.min()) >= FP16_MIN_NORMAL
    assert bool((zeros >= scheme.min_zero).all())
    assert bool((zeros <= scheme.max_code).all())
    if scheme.sym:
        assert bool((zeros == 2 ** (scheme.bits - 1)).all())
    codes = torch.arange(scheme.max_code + 1.0)
    values = (codes - zeros) * scales
    assert bool(torch.isfinite(values.half()).all())
    if scheme.bits <= 4:
        assert torch.equal(values.half().float(), values)
        finite = scales.squeeze(-1) < FP16_MAX / 16  # where q * s itself is a float16 number
        apart = codes.half() * scales.half() - zeros.half() * scales.half()
        assert torch.equal(apart.float()[finite], values[finite])
        mantissa = torch.frexp(scales)[0] * 128
        assert torch.equal(mantissa, mantissa.round())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.sym], ids=str)
def test_error_is_at_most_half_a_step_inside_the_range(scheme):
    w = torch.randn(16, 4, 32, generator=torch.Generator().manual_seed(1))
    scales, zeros = minmax_grid(w, scheme)
    error = (fake_quantize(w, scales, zeros, scheme) - w).abs()
    # half a step, plus what the ends lose to the rounding of scale and zero point
    assert bool((error <= scales * (1.0 + scheme.max_code / 256)).all())
    assert float((error / scales).median()) < 0.3


def test_zero_and_constant_groups_come_back():
    w = groups_of_every_kind(0)
    for scheme in SCHEMES:
        back = fake_quantize(w, *minmax_grid(w, scheme), scheme)
        assert bool((back[0] == 0).all())
        if scheme.bits == 8:
            torch.testing.assert_close(back[1], w[1], rtol=0.01, atol=0)
            torch.testing.assert_close(back[2], w[2], rtol=0.01, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e5, 1e5, width=32), min_size=16, max_size=16),
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
    st.integers(0, 1),
)
def test_any_group_gives_valid_codes(values, bits, sym, min_zero):
    scheme = Scheme(bits, 16, sym, min_zero)
    w = torch.tensor(values).reshape(1, 16)
    q = quantize_rtn(w, scheme)
    back = q.dequantize()
    assert bool(torch.isfinite(back).all())
    assert int(q.q.max()) <= scheme.max_code
    assert bool(((back - w.clamp(-3e4, 3e4)).abs() <= w.abs().max()).all())


def test_codes_use_the_rounded_scale():
    scheme = Scheme(4, 32, False)
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    q = quantize_rtn(w, scheme)
    s, z = q.scales.float().repeat_interleave(32, 1), q.zeros.float().repeat_interleave(32, 1)
    assert torch.equal(q.q.float(), to_codes(w.clone(), s, z, scheme))


def test_search_never_loses_to_the_extremes():
    w = torch.randn(50, 2, 32, generator=torch.Generator().manual_seed(3)) ** 3
    weight = torch.rand(2, 32, generator=torch.Generator().manual_seed(4)) + 0.01
    for scheme in SCHEMES:

        def error(grid, scheme=scheme):
            return ((fake_quantize(w, *grid, scheme) - w).square() * weight).sum(-1)

        plain, searched = error(minmax_grid(w, scheme)), error(search_grid(w, scheme, weight))
        assert bool((searched <= plain + 1e-6).all())
        assert scheme.bits == 8 or float(searched.sum()) < float(plain.sum())


def test_group_that_fits():
    assert fit_group([4096, 11008], 128) == 128
    assert fit_group([576, 1536], 128) == 64
    assert fit_group([200], 128) == 100
    assert fit_group([97], 128) == 97
    assert fit_group([251], 128) is None
    assert fit_group([576, 97], -1) == -1

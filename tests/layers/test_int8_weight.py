"""Dense matrices in 8 bits: the error is half a step, and widths that no group divides work."""

import pytest
import torch

from qengine.layers.int8_weight import GROUP_SIZE, quantize_int8
from qengine.layers.linear import Linear


@pytest.mark.parametrize(("n", "k"), [(40, 576), (16, 128), (24, 200), (8200, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_value_is_within_half_a_step(n, k, dtype):
    weight = (torch.randn(n, k) * torch.rand(n, 1) * 3).to(dtype)
    weight[3] = 0
    quantized = quantize_int8(weight)
    steps = quantized.scales.float().repeat_interleave(GROUP_SIZE, 1)[:, :k]
    exact = (quantized.q.float() - 128) * steps
    assert ((exact - weight.float()).abs() <= steps * 0.501 + weight.float().abs() * 1e-3).all()
    assert not exact[3].any()


def test_a_linear_takes_it():
    weight = torch.randn(96, 192)
    x = torch.randn(5, 192)
    linear = Linear("lm_head", quantize_int8(weight), dtype=torch.float32, device=torch.device("cpu"))
    exact = x @ weight.T
    assert (linear(x) - exact).norm() / exact.norm() < 0.01

"""GPTQ's block kernel in Triton's interpreter against the same steps in torch: run with TRITON_INTERPRET=1."""

import torch

from qengine.convert.gptq_kernel import solve_block


def check(rows, width, group, span, top, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g)
    x = torch.randn(width, 3 * width, generator=g)
    upper = torch.linalg.cholesky(torch.linalg.inv(x @ x.T / (3 * width)), upper=True).contiguous()
    scales = torch.rand(width // group, rows, generator=g) * 0.2 + 0.2
    zeros = torch.randint(1, top, (width // group, rows), generator=g).float()
    group_of = (torch.randperm(width, generator=g) // group).int()
    codes = torch.full((rows, width), 255, dtype=torch.uint8)
    errors = solve_block(weight, upper, scales, zeros, group_of, codes, span, top)
    start, end = span
    w = weight.clone()
    for j in range(start, end):
        s, z = scales[group_of[j]], zeros[group_of[j]]
        code = ((w[:, j] / s).round() + z).clamp(0, top)
        assert torch.equal(code.to(torch.uint8), codes[:, j]), j
        error = (w[:, j] - (code - z) * s) / upper[j, j]
        torch.testing.assert_close(error, errors[:, j - start], rtol=1e-4, atol=1e-5)
        w[:, j + 1 : end] -= error[:, None] * upper[j, j + 1 : end]
    assert bool((codes[:, :start] == 255).all())
    assert bool((codes[:, end:] == 255).all())


if __name__ == "__main__":
    check(37, 96, 32, (32, 80), 15, 0)
    check(16, 64, 16, (0, 64), 3, 1)
    check(5, 40, 20, (20, 40), 255, 2)
    print("ok")

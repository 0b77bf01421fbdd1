"""What calibration data says about one linear layer's input: enough for AWQ and GPTQ, without keeping the data."""

from __future__ import annotations

import torch


class InputStats:
    """Second moments and mean magnitudes of the rows a linear layer sees; call it with x [T, K], any number of times.

    `gram` is sum x x^T [K, K], `magnitude` sum |x| [K], both float32 on the input's device. Rows that hold inf or NaN
    are left out and counted in `bad_rows`.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.bad_rows = 0
        self._gram: torch.Tensor | None = None
        self._magnitude: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> None:
        """Add the rows of x [T, K]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if not bool(torch.isfinite(x.sum())):
            finite = torch.isfinite(x).all(dim=1)
            self.bad_rows += int((~finite).sum())
            x = x[finite]
        if self._gram is None or self._magnitude is None:
            self._gram = x.new_zeros(x.shape[1], x.shape[1])
            self._magnitude = x.new_zeros(x.shape[1])
        self._gram.addmm_(x.T, x)
        self._magnitude.add_(x.abs().sum(0))
        self.rows += x.shape[0]

    @property
    def usable(self) -> bool:
        """True when data was seen, all of it finite and its products too."""
        return self.rows > 0 and self.bad_rows == 0 and bool(torch.isfinite(self._gram_or_fail().sum()))

    def _gram_or_fail(self) -> torch.Tensor:
        assert self._gram is not None, "no calibration rows were seen"
        return self._gram

    def second_moment(self) -> torch.Tensor:
        """Mean of x x^T, [K, K] float32."""
        return self._gram_or_fail() / max(self.rows, 1)

    def mean_magnitude(self) -> torch.Tensor:
        """Mean of |x| for each column, [K] float32."""
        assert self._magnitude is not None, "no calibration rows were seen"
        return self._magnitude / max(self.rows, 1)


def output_error(delta: torch.Tensor, second_moment: torch.Tensor) -> torch.Tensor:
    """Mean squared change of the outputs, summed over outputs: tr(dW H dW^T), a scalar.

    delta: W_quantized - W, [N, K]. second_moment: H = mean x x^T, [K, K]. This equals mean |dW x|^2 over the
    calibration rows exactly, without running them again.
    """
    return torch.sum((delta @ second_moment) * delta)

"""What calibration data says about one linear layer's input: enough for AWQ and GPTQ, without keeping the data."""

from __future__ import annotations

import torch

from qengine.convert.phases import phase
from qengine.convert.precision import tensor_cores


class InputStats:
    """Moments of the rows a linear layer sees; call it with x [T, K], any number of times.

    `reference`, when given, is what the same rows are in the unquantized model; then the cross moment is kept too.
    Sums are float32 on the input's device. Rows that hold inf or NaN are left out and counted in `bad_rows`.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.bad_rows = 0
        self._gram: torch.Tensor | None = None
        self._magnitude: torch.Tensor | None = None
        self._cross: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Add the rows of x [T, K], reference [T, K]."""
        with phase("moments"), tensor_cores(x.device):
            self._add(x, reference)

    def _add(self, x: torch.Tensor, reference: torch.Tensor | None) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        shift = None if reference is None else reference.detach().reshape(x.shape).float() - x
        if not bool(torch.isfinite(x.sum() if shift is None else x.sum() + shift.sum())):
            finite = torch.isfinite(x).all(dim=1)
            if shift is not None:
                finite &= torch.isfinite(shift).all(dim=1)
                shift = shift[finite]
            self.bad_rows += int((~finite).sum())
            x = x[finite]
        if self._gram is None or self._magnitude is None:
            self._gram = x.new_zeros(x.shape[1], x.shape[1])
            self._magnitude = x.new_zeros(x.shape[1])
        self._gram.addmm_(x.T, x)
        self._magnitude.add_(x.abs().sum(0))
        if shift is not None:
            if self._cross is None:
                self._cross = torch.zeros_like(self._gram)
            self._cross.addmm_(shift.T, x)
        self.rows += x.shape[0]

    @property
    def usable(self) -> bool:
        """True when data was seen, all of it finite and its products too."""
        if self.rows == 0 or self.bad_rows:
            return False
        sums = self._gram_or_fail().sum() + (0 if self._cross is None else self._cross.sum())
        return bool(torch.isfinite(sums))

    def _gram_or_fail(self) -> torch.Tensor:
        assert self._gram is not None, "no calibration rows were seen"
        return self._gram

    def second_moment(self) -> torch.Tensor:
        """H = mean of x x^T, [K, K] float32."""
        return self._gram_or_fail() / max(self.rows, 1)

    def cross_moment(self) -> torch.Tensor | None:
        """C = mean of (reference - x) x^T, [K, K] float32; None where no reference was given."""
        return None if self._cross is None else self._cross / max(self.rows, 1)

    def merged(self, other: InputStats) -> InputStats:
        """The statistics of the rows of both."""
        both = InputStats()
        both.rows, both.bad_rows = self.rows + other.rows, self.bad_rows + other.bad_rows
        both._gram = _sum(self._gram, other._gram)
        both._magnitude = _sum(self._magnitude, other._magnitude)
        both._cross = _sum(self._cross, other._cross)
        return both

    def mean_magnitude(self) -> torch.Tensor:
        """Mean of |x| for each column, [K] float32."""
        assert self._magnitude is not None, "no calibration rows were seen"
        return self._magnitude / max(self.rows, 1)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


class SplitStats:
    """Statistics of the rows that are fitted, and of the rows held out to judge by (None where there are none)."""

    def __init__(self, hold_out: bool) -> None:
        self.fit = InputStats()
        self.held = InputStats() if hold_out else None

    def add(self, x: torch.Tensor, reference: torch.Tensor | None, fit_rows: int) -> None:
        """Add rows x [T, K]; the first `fit_rows` are fitted."""
        if self.held is None:
            self.fit(x, reference)
            return
        for stats, rows in ((self.fit, slice(0, fit_rows)), (self.held, slice(fit_rows, None))):
            if x[rows].shape[0]:
                stats(x[rows], None if reference is None else reference[rows])

    @property
    def usable(self) -> bool:
        """True when all data was finite, and there is some of each kind asked for."""
        return self.fit.usable and (self.held is None or self.held.usable)

    def release(self) -> None:
        """Forget all of it: a wide layer's sums are half a gigabyte each."""
        self.fit, self.held = InputStats(), None if self.held is None else InputStats()

    def all_rows(self) -> InputStats:
        """Both kinds together."""
        return self.fit if self.held is None else self.fit.merged(self.held)


def output_error(delta: torch.Tensor, second_moment: torch.Tensor) -> torch.Tensor:
    """Mean squared change of the outputs, summed over outputs: tr(dW H dW^T), a scalar.

    delta: W_quantized - W, [N, K]. second_moment: H = mean x x^T, [K, K]. This equals mean |dW x|^2 over the
    calibration rows exactly, without running them again.
    """
    return torch.sum((delta @ second_moment) * delta)


def model_error(
    delta: torch.Tensor, weight: torch.Tensor, second_moment: torch.Tensor, cross_moment: torch.Tensor | None
) -> torch.Tensor:
    """Mean |W' x - W x_ref|^2 of W' = W + delta, less the part that no W' changes; a scalar, which may be negative.

    x is the input in the quantized model, x_ref in the source. Without a cross moment it is `output_error`.
    """
    error = output_error(delta, second_moment)
    return error if cross_moment is None else error - 2 * torch.sum((weight @ cross_moment) * delta)

# mypy: disable-error-code="no-untyped-def"
"""RMSNorm and LayerNorm with the residual sums around them, a row a program, each tensor read and written once.

One kernel serves all forms. For a row of the residual stream `hidden`, of H values:

    d      = delta, or norm(delta) * inner where a family norms what a sublayer returns (Gemma 2 and 3, GLM-4, OLMo 2)
    hidden = hidden + d (+ second)                        in hidden's dtype
    out    = norm(hidden) * weight (+ bias)               in out's dtype

rms:   norm(x) = x / sqrt(mean(x^2) + eps)
layer: norm(x) = (x - mean(x)) / sqrt(var(x) + eps)

Sources: RMSNorm, arXiv 1910.07467; LayerNorm, arXiv 1607.06450. Sums, products and the root are in float32. Values are
rounded where torch's own chain of operations rounds them: the input of a norm to its weight's dtype, its result to that
dtype and then to the output's; every sum of hidden to hidden's dtype. Nothing else is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .card import dependent_launch, launch_options

MAX_SIZE = 16384
"""Longest row, in values: a row is held in one program's registers."""


@triton.jit
def _normed(
    x,
    w,
    w_ptr,
    b,
    b_ptr,
    columns,
    mask,
    H,
    eps,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """norm(x) * w + b of one row, in DTYPE, the weight's. x: float32 that its own dtype holds, 0 outside the mask.

    EARLY: w and b hold the weights; else they are loaded here, after the sums.
    """
    x = x.to(DTYPE).to(tl.float32)
    if KIND == "layer":
        x = tl.where(mask, x - tl.sum(x, 0) / H, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    if HAS_WEIGHT:
        if not EARLY:
            w = tl.load(w_ptr + columns, mask, other=0.0)
        y = y * w.to(tl.float32)
    if HAS_BIAS:
        if not EARLY:
            b = tl.load(b_ptr + columns, mask, other=0.0)
        y = y + b.to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def norm_kernel(
    hidden_ptr,
    delta_ptr,
    second_ptr,
    inner_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    H,
    hidden_stride,
    delta_stride,
    second_stride,
    out_stride,
    inner_eps,
    eps,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: see the module's docstring. Tensors that HAS_* excludes may be anything; without a weight, hidden.

    Strides: of rows, in values. BLOCK: a power of two from H. VECTOR: values that one load takes at most, or 0: as many
    as 16 bytes hold; with tensors of 2 and of 4 bytes it keeps a thread's values the same in all of them. EARLY: load
    the weights before the sums, for which long rows lack the registers. PDL: launched with programmatic dependent
    launch; the weights may be read before the kernel ahead has ended, so they must not be its results.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if VECTOR > 0:
        columns = tl.max_contiguous(columns, VECTOR)
    mask = columns < H
    w = columns
    b = columns
    inner = columns
    if PDL:
        gdc_launch_dependents()
    # ahead of the sums, so that the weights are on their way while the sums are made
    if HAS_WEIGHT and EARLY:
        w = tl.load(weight_ptr + columns, mask, other=0.0)
    if HAS_BIAS and EARLY:
        b = tl.load(bias_ptr + columns, mask, other=0.0)
    if HAS_INNER and EARLY:
        inner = tl.load(inner_ptr + columns, mask, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(hidden_ptr + row * hidden_stride + columns, mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        STREAM: tl.constexpr = hidden_ptr.dtype.element_ty
        d = tl.load(delta_ptr + row * delta_stride + columns, mask, other=0.0).to(tl.float32)
        if HAS_INNER:
            INNER: tl.constexpr = inner_ptr.dtype.element_ty
            d = _normed(d, inner, inner_ptr, b, bias_ptr, columns, mask, H, inner_eps, INNER, "rms", True, False, EARLY)
            d = d.to(STREAM).to(tl.float32)
        x = (x + d).to(STREAM).to(tl.float32)
        if HAS_SECOND:
            s = tl.load(second_ptr + row * second_stride + columns, mask, other=0.0).to(tl.float32)
            x = (x + s).to(STREAM).to(tl.float32)
        tl.store(hidden_ptr + row * hidden_stride + columns, x.to(STREAM), mask)
    if HAS_OUT:
        DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
        y = _normed(x, w, weight_ptr, b, bias_ptr, columns, mask, H, eps, DTYPE, KIND, HAS_WEIGHT, HAS_BIAS, EARLY)
        tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask)


@dataclass(frozen=True)
class Shape:
    """What of a launch depends on the sizes alone: see norm_kernel."""

    block: int
    vector: int
    early: bool
    warps: int


def shape_for(size: int, rows: int, widths: set[int]) -> Shape:
    """The launch for `rows` rows of `size` values in tensors whose values take `widths` bytes.

    Some rows a multiprocessor want each row's loads spread over many warps; one row wants a short way from warp to
    warp, and many rows as many programs at once as the card holds (measured on an H200).
    """
    block = triton.next_power_of_2(size)
    early = block <= 8192
    values = 8 if 64 < rows <= 512 else 16
    warps = max(1, min(16, block // (32 * values))) if early else 32
    return Shape(block, 4 if len(widths) > 1 else 0, early, warps)


def run_norm(
    hidden: torch.Tensor,
    out: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str = "rms",
    *,
    delta: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
    inner: torch.Tensor | None = None,
    inner_eps: float = 0.0,
    shape: Shape | None = None,
    pdl: bool | None = None,
) -> None:
    """Launch norm_kernel on the current stream. All tensors on one CUDA device, matrices [T, H] with dense rows.

    out None: only the sum. Without delta, hidden is only read, and out may be hidden itself.
    shape: what shape_for gives, or another for measurements.
    """
    rows, size = hidden.shape
    if rows == 0:
        return
    pdl = dependent_launch(hidden.device) if pdl is None else pdl
    used = (hidden, out, weight, bias, delta, second, inner)
    shape = shape or shape_for(size, rows, {x.element_size() for x in used if x is not None})
    norm_kernel[(rows,)](
        hidden,
        hidden if delta is None else delta,
        hidden if second is None else second,
        hidden if inner is None else inner,
        hidden if weight is None else weight,
        hidden if bias is None else bias,
        hidden if out is None else out,
        size,
        hidden.stride(0),
        0 if delta is None else delta.stride(0),
        0 if second is None else second.stride(0),
        0 if out is None else out.stride(0),
        inner_eps,
        eps,
        BLOCK=shape.block,
        VECTOR=shape.vector,
        EARLY=shape.early,
        KIND=kind,
        HAS_DELTA=delta is not None,
        HAS_SECOND=second is not None,
        HAS_INNER=inner is not None,
        HAS_OUT=out is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=shape.warps,
        num_stages=1,
        # a product that is rounded before it is added stays so: the bits of torch's chain
        enable_fp_fusion=False,
        **launch_options(pdl),
    )

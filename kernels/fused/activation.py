# mypy: disable-error-code="no-untyped-def"
"""The gated activation of an MLP, out = act(gate) * up, in one pass.

Every function is computed in float32 and rounded where torch's own operations round: act(gate) to gate's dtype (a
function that torch makes of several operations, quick_gelu and relu2, after each of them), then the product. So the
results are the bits that torch gives for act(gate) * up on a GPU, but for the exact gelu: CUDA's own versions differ
in the last place of erf, which shows where 1 + erf(x / sqrt(2)) is near 0, below x = -2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from .card import dependent_launch, launch_options

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Name in a Hugging Face config -> the function that the kernel computes."""


@triton.jit
def _exp(x, LIB: tl.constexpr):
    return libdevice.exp(x) if LIB else tl.exp(x)


@triton.jit
def _tanh(x, LIB: tl.constexpr):
    if LIB:
        y = libdevice.tanh(x)
    else:
        # odd in |x|, so that nothing overflows; the interpreter knows no tanh
        e = tl.exp(-2.0 * tl.abs(x))
        y = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
    return y


@triton.jit
def _sigmoid(x, LIB: tl.constexpr):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x, LIB))


@triton.jit
def activate(x, DTYPE: tl.constexpr, KIND: tl.constexpr, LIB: tl.constexpr):
    """KIND of float32 values x that DTYPE holds, rounded as torch rounds for tensors of DTYPE; returned in DTYPE.

    LIB: use CUDA's math library, as torch does; without it plain Triton, which the interpreter can run.
    """
    if KIND == "silu":
        y = tl.div_rn(x, 1.0 + _exp(-x, LIB))
    elif KIND == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)
        y = 0.5 * x * (1.0 + _tanh(inner, LIB))
    elif KIND == "quick_gelu":
        scaled = (x * 1.702).to(DTYPE).to(tl.float32)
        y = x * _sigmoid(scaled, LIB).to(DTYPE).to(tl.float32)
    elif KIND == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif KIND == "relu2":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    elif KIND == "sigmoid":
        y = _sigmoid(x, LIB)
    else:
        tl.static_assert(KIND == "tanh", "unknown activation")
        y = _tanh(x, LIB)
    return y.to(DTYPE)


@triton.jit
def _quick_sigmoid(x, LIB: tl.constexpr):
    if LIB:
        # 1 / (1 + 2^(-x log2 e)): four instructions, none of them slow at the ends of the range
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def activate_quickly(x, DTYPE: tl.constexpr, KIND: tl.constexpr, LIB: tl.constexpr):
    """As `activate`, for the end of a kernel that has other work: exponential and quotient are the card's own.

    They are a few last places of float32 off, so that one value in some thousands is rounded to DTYPE the other way.
    gelu_tanh is taken as x sigmoid(2 u), for 1 + tanh(u) = 2 sigmoid(2 u).
    """
    if KIND == "silu":
        y = (x * _quick_sigmoid(x, LIB)).to(DTYPE)
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)
        y = (x * _quick_sigmoid(2.0 * inner, LIB)).to(DTYPE)
    elif KIND == "quick_gelu":
        scaled = (x * 1.702).to(DTYPE).to(tl.float32)
        y = (x * _quick_sigmoid(scaled, LIB).to(DTYPE).to(tl.float32)).to(DTYPE)
    elif KIND == "sigmoid":
        y = _quick_sigmoid(x, LIB).to(DTYPE)
    else:
        y = activate(x, DTYPE, KIND, LIB)
    return y


@triton.jit
def act_and_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    size,
    blocks,
    gate_stride,
    up_stride,
    out_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    LIB: tl.constexpr,
    PDL: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """BLOCK columns of one row. blocks: of a row, ceil(size / BLOCK). Strides: of rows, in values.

    PAIRED: gate and up lie in eights by turns.
    """
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    columns = place % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = columns // 8 * 16 + columns % 8 if PAIRED else columns
    # 1 beside the row, not 0: a division of 0 takes the slow way, and with it the whole warp
    gate = tl.load(gate_ptr + row * gate_stride + at, mask, other=1.0)
    up = tl.load(up_ptr + row * up_stride + at, mask, other=0.0)
    y = activate(gate.to(tl.float32), gate_ptr.dtype.element_ty, KIND, LIB)
    y = y.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask)


def launch_for(size: int, rows: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of `size` values: small pieces while they all fit on the card at once."""
    values = rows * size
    block, warps = (256, 1) if values < 1 << 19 else (1024, 4) if values < 1 << 23 else (1024, 2)
    block = min(block, max(32, triton.next_power_of_2(size)))
    return block, min(warps, max(1, block // 256))


def run_act_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    name: str,
    *,
    launch: tuple[int, int] | None = None,
    pdl: bool | None = None,
    paired: bool = False,
) -> None:
    """Launch act_and_mul_kernel on the current stream: gate, up, out [T, I] on one CUDA device, with dense rows.

    name: a key of KINDS. launch: (BLOCK, warps), or the usual one. paired: gate is [T, 2 I], 8 values of gate and
    their 8 of up by turns, and up the same from its column 8 on.
    """
    rows, size = out.shape
    if rows == 0 or size == 0:
        return
    block, warps = launch or launch_for(size, rows)
    blocks = triton.cdiv(size, block)
    pdl = dependent_launch(gate.device) if pdl is None else pdl
    act_and_mul_kernel[(rows * blocks,)](
        gate,
        up,
        out,
        size,
        blocks,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        KIND=KINDS[name],
        BLOCK=block,
        LIB=gate.is_cuda,
        PDL=pdl,
        PAIRED=paired,
        num_warps=warps,
        num_stages=1,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )

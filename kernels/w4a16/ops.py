"""The packed linear layer as a torch operator: `w4a16_linear` and `w4a16_gated` for callers, `run` for a given launch.

Their operator has a fake implementation, so torch.compile and export see through it. Nothing here allocates but the
result (and what a gated "dequantize" launch has yet to activate), and nothing waits for the device: the split's partial
sums and the slices of unpacked weights live in a workspace a (device, stream), made on first use. Call `reserve` before
capturing a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from qengine.kernels import turing
from qengine.kernels.fused.activation import KINDS, run_act_and_mul
from qengine.kernels.launch import Launch, pick
from qengine.kernels.operator import operator

from .dequant import dequantize_rows
from .gemm import w4a16_gemm
from .layout import W4A16Weight
from .ref import dequantize_ref, gated_ref, linear_ref

SPACE_BYTES = 32 << 20
LARGE_SPACE_BYTES = 256 << 20
LARGE_CARD_BYTES = 30 << 30
TILES = 1 << 16
Spaces = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
_workspaces: Spaces = {}
_separate: ContextVar[Spaces | None] = ContextVar("qengine_other_workspaces", default=None)
_sparing: set[int] = set()


def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes uint8, locks int32 all 0) of the device's current stream."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    separate = _separate.get()
    spaces = _workspaces if separate is None else separate
    if key not in spaces:
        spaces[key] = (
            torch.empty(_space_bytes(index), dtype=torch.uint8, device=device),
            torch.zeros(TILES, dtype=torch.int32, device=device),
        )
    return spaces[key]


def _space_bytes(index: int) -> int:
    # cuBLAS loses less on whole layers than on slices of them; small cards keep the memory for the model
    large = torch.cuda.get_device_properties(index).total_memory >= LARGE_CARD_BYTES
    return LARGE_SPACE_BYTES if large and index not in _sparing else SPACE_BYTES


def spare_memory(device: torch.device, sparing: bool = True) -> None:
    """Whether workspaces that are made from now on are as small as on a small card, whatever the card has."""
    index = torch.cuda.current_device() if device.index is None else device.index
    (_sparing.add if sparing else _sparing.discard)(index)


def release(device: torch.device) -> None:
    """Give up the workspaces of a device; none of its streams may be in use or captured in a graph that is."""
    index = torch.cuda.current_device() if device.index is None else device.index
    for key in [key for key in _workspaces if key[0] == index]:
        del _workspaces[key]


@contextlib.contextmanager
def other_workspaces() -> Iterator[None]:
    """Within, this thread's workspaces are others than outside, and are dropped at the end: a dry run's."""
    token = _separate.set({})
    try:
        yield
    finally:
        _separate.reset(token)


def reserve(device: torch.device | str, stream: torch.cuda.Stream | None = None) -> int:
    """Make the workspace of a stream (the current one if None) and return its bytes; do it before graph capture."""
    with torch.cuda.stream(stream):
        space, locks = workspace(torch.device(device))
    return space.numel() + locks.numel() * 4


@functools.lru_cache
def device_limits(index: int) -> tuple[int, int, int]:
    """(compute capability that Triton compiles for, shared memory a program may use, multiprocessors)."""
    properties = torch.cuda.get_device_properties(index)
    sm = properties.major * 10 + properties.minor
    override = triton.knobs.runtime.override_arch
    if override:
        sm = int("".join(c for c in override if c.isdigit()))
    turing.ensure(sm)
    smem = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return sm, min(smem, 65536) if sm == 75 else smem, properties.multi_processor_count


def choose(m: int, weight: W4A16Weight, device: torch.device) -> Launch:
    """The launch that `pick` gives for m rows on this device."""
    sm, smem, count = device_limits(torch.cuda.current_device() if device.index is None else device.index)
    return pick(m, weight.n, weight.k, weight.group_size, sm, smem, weight.bits, count)


def run(
    x: torch.Tensor,
    weight: W4A16Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: Launch,
    activation: str | None = None,
) -> None:
    """out [M, N] = x [M, K] @ W^T + bias with the given launch, on the current stream.

    activation: a key of KINDS: the weight's rows are paired (layout.paired_rows) and out [M, N / 2] is act(gate) * up.
    """
    if launch.kernel != "dequantize":
        _run_gemm(x, weight, bias, out, launch, activation)
    elif activation is None:
        _run_dequantize(x, weight, bias, out)
    else:
        both = out.new_empty(x.shape[0], weight.n)
        _run_dequantize(x, weight, bias, both)
        run_act_and_mul(both, both[:, 8:], out, activation, paired=True)


def fit_split(launch: Launch, tiles: int, floats: int, locks: int) -> tuple[int, int]:
    """(split, whole) of a launch over `tiles` tiles, with no more parts than a workspace of these sizes holds."""
    whole = min(launch.whole, tiles)
    rest = tiles - whole
    if launch.split == 1 or rest == 0:
        return 1, tiles
    split = min(launch.split, floats // (rest * launch.bm * launch.bn)) if rest <= locks else 1
    return (split, whole) if split > 1 else (1, tiles)


def _run_gemm(
    x: torch.Tensor,
    weight: W4A16Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: Launch,
    activation: str | None,
) -> None:
    m = x.shape[0]
    tiles = math.ceil(m / launch.bm) * math.ceil(weight.n / launch.bn)
    part, locks = workspace(x.device) if launch.split > 1 else (x, x)
    split, whole = fit_split(launch, tiles, part.numel() // 4, locks.numel())
    if split > 1:
        part = part.view(torch.float32)
    grid = (whole + (tiles - whole) * split,)
    tma = launch.tma and weight.perm is None
    width = weight.block // 2 if launch.halves else weight.block
    w4a16_gemm[grid](
        x,
        TensorDescriptor.from_tensor(x, [launch.bm, width]) if tma else x,
        weight.words,
        weight.scales_zeros,
        weight.words if weight.perm is None else weight.perm,
        x if bias is None else bias,
        out,
        part if split > 1 else x,
        locks if split > 1 else weight.words,
        m,
        weight.n // 8,
        weight.k,
        weight.words.shape[1],
        x.stride(0),
        out.stride(0),
        split,
        whole,
        weight.multiplier,
        BITS=weight.bits,
        GROUP=weight.group_size,
        BM=launch.bm,
        BN=launch.bn,
        SPLIT=split > 1,
        PREFETCH=launch.prefetch,
        SCALED=launch.scaled,
        HALVES=launch.halves,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=weight.perm is None and weight.k == weight.k_padded,
        PDL=launch.pdl,
        TMA=tma,
        # fewer than four warps are no warpgroup: their products are mma.sync
        WGMMA=device_limits(x.device.index or 0)[0] == 90 and launch.warps >= 4,
        OVERLAP=launch.overlap,
        SPREAD=launch.spread and split > 1,
        ACT="" if activation is None else KINDS[activation],
        ASM=True,
        num_warps=launch.warps,
        num_stages=launch.stages,
        launch_pdl=launch.pdl > 0,
    )


def _run_dequantize(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    space, _ = workspace(x.device)
    columns = weight.k_padded
    slices = max(1, math.ceil(weight.n * columns * x.element_size() / space.numel()))
    rows = math.ceil(weight.n / slices / 128) * 128
    rows = min(rows, space.numel() // (columns * x.element_size()) // 16 * 16)
    if weight.perm is not None:
        # padded places name column K, which is 0
        x = x if weight.k == weight.k_padded else torch.nn.functional.pad(x, (0, 1))
        x = x.index_select(1, weight.perm)
    else:
        columns = weight.k
    for start in range(0, weight.n, rows):
        count = min(rows, weight.n - start)
        buffer = space[: count * weight.k_padded * x.element_size()].view(x.dtype).view(count, weight.k_padded)
        _dequantize_into(buffer, weight, start, count)
        target = out[:, start : start + count]
        if bias is None:
            torch.mm(x, buffer[:, :columns].t(), out=target)
        else:
            torch.addmm(bias[start : start + count], x, buffer[:, :columns].t(), out=target)


def _dequantize_into(buffer: torch.Tensor, weight: W4A16Weight, start: int, count: int) -> None:
    grid = (weight.words.shape[1], math.ceil(count / 64))
    dequantize_rows[grid](
        weight.words,
        weight.scales_zeros,
        buffer,
        start // 16,
        count,
        weight.n,
        weight.words.shape[1],
        buffer.stride(0),
        weight.multiplier,
        BITS=weight.bits,
        GROUP=weight.group_size,
        BN=64,
        ASM=True,
        num_warps=4,
        num_stages=1,
    )


def dequantize(weight: W4A16Weight, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """W [N, K] in x's own column order, unpacked on the weight's device."""
    if not weight.words.is_cuda:
        return dequantize_ref(weight, dtype)
    buffer = torch.empty(weight.n, weight.k_padded, dtype=dtype, device=weight.words.device)
    _dequantize_into(buffer, weight, 0, weight.n)
    if weight.perm is None:
        return buffer[:, : weight.k]
    plain = torch.empty(weight.n, weight.k + 1, dtype=dtype, device=buffer.device)
    plain[:, weight.perm.long()] = buffer
    return plain[:, : weight.k]


@operator("qengine::w4a16_linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales_zeros: torch.Tensor,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    bits: int,
    group_size: int,
    multiplier: float,
    activation: str | None = None,
) -> torch.Tensor:
    weight = W4A16Weight(words, scales_zeros, perm, n, x.shape[1], bits, group_size, multiplier)
    if not x.is_cuda:
        return linear_ref(x, weight, bias) if activation is None else gated_ref(x, weight, bias, activation)
    out = torch.empty(x.shape[0], _columns(n, activation), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        x = x if x.stride(1) == 1 else x.contiguous()
        run(x, weight, bias, out, choose(x.shape[0], weight, x.device), activation)
    return out


@_linear.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scales_zeros: torch.Tensor,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    bits: int,
    group_size: int,
    multiplier: float,
    activation: str | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], _columns(n, activation))


def _columns(n: int, activation: str | None) -> int:
    return n if activation is None else n // 2


def w4a16_linear(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [M, N] = x [M, K] @ W^T + bias, in x's dtype (float16, or bfloat16 from compute capability 8.0).

    Raises ValueError for shapes, dtypes or devices that do not fit. A CPU tensor is served by the reference; a CUDA
    tensor never is.
    """
    _check_input(x, weight)
    return _linear(x, *_fields(weight, bias))


def w4a16_gated(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(gate) * up [M, N / 2] of y = x @ W^T + bias, whose columns are paired (layout.paired_rows); see w4a16_linear.

    The result is that of w4a16_linear with the same launch followed by fused.ops.act_and_mul, but for the quick
    exponential of fused.activation.activate_quickly. activation: a key of fused.activation.KINDS.

    Raises ValueError as w4a16_linear does, for other activations and for N that 16 does not divide.
    """
    _check_input(x, weight)
    if activation not in KINDS:
        raise ValueError(f"w4a16: activation {activation!r} is not supported; known are {', '.join(KINDS)}")
    if weight.n % 16:
        raise ValueError(f"w4a16: gate and up have {weight.n} rows together; multiples of 16 can be paired")
    return _linear(x, *_fields(weight, bias), activation)


def _fields(weight: W4A16Weight, bias: torch.Tensor | None) -> tuple[Any, ...]:
    form = (weight.n, weight.bits, weight.group_size, weight.multiplier)
    return (weight.words, weight.scales_zeros, weight.perm, bias, *form)


def _check_input(x: torch.Tensor, weight: W4A16Weight) -> None:
    if x.dim() != 2 or x.shape[1] != weight.k:
        raise ValueError(f"w4a16: x must be [rows, {weight.k}], got {list(x.shape)}")
    if x.device != weight.words.device:
        raise ValueError(f"w4a16: x is on {x.device}, the weight on {weight.words.device}")
    if x.is_cuda:
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"w4a16: x is {x.dtype}; float16 and bfloat16 are served on a GPU")
        if x.dtype == torch.bfloat16 and device_limits(x.device.index or 0)[0] < 80:
            raise ValueError("w4a16: bfloat16 needs compute capability 8.0; use float16 on this card")

"""The small operations between matrix products, as layers call them.

CPU tensors go to the references in ref.py; CUDA tensors go to the kernels, never to a reference. On a GPU each is one
launch, as a torch operator `qengine::...` with a fake implementation, so torch.compile and export see through it;
nothing waits for the device or allocates but the result, so all can be captured in a CUDA graph. Matrices are [T, H]
with dense rows (stride(1) == 1) and any stride(0); T may be 0; rows have 1 to 16,384 values in the norms. What is
rounded where: norm.py, activation.py. Wrong shapes, dtypes or devices raise ValueError with what was got.
"""

from __future__ import annotations

import torch

from . import library, ref
from .activation import KINDS
from .norm import MAX_SIZE

__all__ = [
    "act_and_mul",
    "add_layer_norm",
    "add_rms_norm",
    "embed",
    "layer_norm",
    "norm_add",
    "norm_add_norm",
    "rms_norm",
    "rms_norm_",
    "rotary_angles",
]
FLOATING = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight -> [T, H] in out_dtype (None: the weight's dtype, or x's without a weight).

    x [T, H] and weight [H]: float16, bfloat16 or float32 each.
    """
    if x.is_cpu:
        return ref.rms_norm(x, weight, eps, out_dtype)
    _check("rms_norm", x, vectors=(weight,))
    return library.norm(x, weight, None, eps, out_dtype or _result_dtype(x, weight), "rms")


def rms_norm_(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """rms_norm in place: x [T, H], which may be a slice of the columns of a wider matrix (q in qkv)."""
    if x.is_cpu:
        x.copy_(ref.rms_norm(x, weight, eps))
        return
    _check("rms_norm_", x, vectors=(weight,))
    library.rms_norm_(x, weight, eps)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias -> [T, H] in out_dtype (None: as in rms_norm).

    A bias has the weight's dtype, and needs a weight.
    """
    if x.is_cpu:
        return ref.layer_norm(x, weight, bias, eps, out_dtype)
    _check("layer_norm", x, vectors=(weight, bias))
    _check_bias("layer_norm", weight, bias)
    return library.norm(x, weight, bias, eps, out_dtype or _result_dtype(x, weight), "layer")


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += delta (+ second), in place and in hidden's dtype; returns rms_norm(hidden, weight, eps, out_dtype).

    hidden, delta, second [T, H]: float16, bfloat16 or float32 each. second: the other branch of a parallel residual.
    """
    if hidden.is_cpu:
        return ref.add_rms_norm(hidden, delta, weight, eps, out_dtype, second)
    _check("add_rms_norm", hidden, (delta, second), (weight,))
    dtype = out_dtype or _result_dtype(hidden, weight)
    return library.add_norm(hidden, delta, second, weight, None, eps, dtype, "rms")


def add_layer_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """As add_rms_norm, with layer_norm(hidden, weight, bias, eps, out_dtype)."""
    if hidden.is_cpu:
        return ref.add_layer_norm(hidden, delta, weight, bias, eps, out_dtype, second)
    _check("add_layer_norm", hidden, (delta, second), (weight, bias))
    _check_bias("add_layer_norm", weight, bias)
    dtype = out_dtype or _result_dtype(hidden, weight)
    return library.add_norm(hidden, delta, second, weight, bias, eps, dtype, "layer")


def norm_add(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """hidden += rms_norm(delta, weight, eps, hidden.dtype), in place (OLMo 2). hidden, delta [T, H], weight [H]."""
    if hidden.is_cpu:
        ref.norm_add(hidden, delta, weight, eps)
        return
    _check("norm_add", hidden, (delta,), (weight,))
    library.norm_add(hidden, delta, weight, eps)


def norm_add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    delta_weight: torch.Tensor,
    delta_eps: float,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """norm_add by delta_weight and delta_eps, then rms_norm(hidden, weight, eps, out_dtype) (Gemma 2 and 3, GLM-4)."""
    if hidden.is_cpu:
        return ref.norm_add_norm(hidden, delta, delta_weight, delta_eps, weight, eps, out_dtype)
    _check("norm_add_norm", hidden, (delta,), (delta_weight, weight))
    dtype = out_dtype or _result_dtype(hidden, weight)
    return library.norm_add_norm(hidden, delta, delta_weight, delta_eps, weight, eps, dtype)


def act_and_mul(x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], name: str) -> torch.Tensor:
    """act(gate) * up -> [T, I] in gate's dtype. x: gate and up joined [T, 2 I], or the two, [T, I] each, of one dtype.

    name: one of activation.KINDS, as Hugging Face configs call them.
    """
    if isinstance(x, torch.Tensor):
        if x.dim() != 2 or x.shape[1] % 2:
            raise ValueError(f"act_and_mul: gate and up joined must be [rows, 2 * size], got {list(x.shape)}")
        size = x.shape[1] // 2
        gate, up = x[:, :size], x[:, size:]
    else:
        gate, up = x
    if name not in KINDS:
        raise ValueError(f"act_and_mul: activation {name!r} is not supported; known are {', '.join(KINDS)}")
    if gate.is_cpu:
        return ref.act_and_mul(gate, up, name)
    _check("act_and_mul", gate, (up,), limit=False)
    if gate.dtype != up.dtype:
        raise ValueError(f"act_and_mul: gate is {gate.dtype}, up is {up.dtype}; both must be of one dtype")
    return library.act_and_mul(gate, up, name)


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """Rows of table [V, H] for ids [T] -> [T, H]: round(round(table[id]) * scale) in out_dtype.

    ids: int64 or int32; an id outside [0, V) gives zeros and reads nothing. table: float16, bfloat16 or float32, on the
    ids' device or, with ids on a GPU, in pinned host memory, which the GPU then reads in place.
    """
    if ids.is_cpu:
        return ref.embed(ids, table, scale, out_dtype)
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"embed: ids must be int64 or int32 [tokens], got {ids.dtype} {list(ids.shape)}")
    if table.dim() != 2 or table.stride(1) != 1 or table.dtype not in FLOATING or out_dtype not in FLOATING:
        raise ValueError(
            f"embed: the table must be [V, H] with dense rows, it and the result float16, bfloat16 or float32; got "
            f"{table.dtype} {list(table.shape)} strides {list(table.stride())}, result {out_dtype}"
        )
    if table.is_cpu and not table.is_pinned():
        raise ValueError(
            "embed: the table is in pageable host memory, which the GPU cannot read; pin it (pin_memory())"
        )
    if table.is_cuda and table.device != ids.device:
        raise ValueError(f"embed: ids are on {ids.device}, the table on {table.device}")
    return library.embed(ids, table, scale, out_dtype)


def rotary_angles(
    positions: torch.Tensor, inverse: torch.Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, 1, R] in dtype, times factor, sin signed: what `ref.rotate` and the cache write take.

    positions: int64 or int32 [T]. inverse: float32 [R/2], or [T, R/2] where frequencies depend on the sequence.
    interleaved: pairs (0, 1), (2, 3), ... instead of (i, i + R/2). The error against float64: rotary.py.
    """
    if positions.is_cpu:
        return ref.rotary_angles(positions, inverse, factor, dtype, interleaved)
    if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rotary_angles: positions must be int64 or int32 [tokens], got {list(positions.shape)}")
    fits = inverse.dim() == 1 or (inverse.dim() == 2 and inverse.shape[0] == positions.shape[0])
    if not fits or inverse.dtype != torch.float32 or inverse.device != positions.device:
        raise ValueError(
            f"rotary_angles: inverse frequencies must be float32 [R/2] or [{positions.shape[0]}, R/2] on "
            f"{positions.device}, got {inverse.dtype} {list(inverse.shape)} on {inverse.device}"
        )
    if dtype not in FLOATING:
        raise ValueError(f"rotary_angles: the result must be float16, bfloat16 or float32, got {dtype}")
    cos, sin = library.rotary_angles(positions, inverse, factor, dtype, interleaved)
    return cos, sin


def _result_dtype(x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else weight.dtype


def _check_bias(name: str, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        beside = "no weight" if weight is None else f"a weight of {weight.dtype}"
        raise ValueError(f"{name}: a bias needs a weight of its dtype; got a bias of {bias.dtype} and {beside}")


def _check(
    name: str,
    x: torch.Tensor,
    rows: tuple[torch.Tensor | None, ...] = (),
    vectors: tuple[torch.Tensor | None, ...] = (),
    *,
    limit: bool = True,
) -> None:
    """Refuse what the kernels would misread: x and `rows` must be [T, H], `vectors` [H], all on x's CUDA device."""
    for matrix in (x, *rows):
        if matrix is None:
            continue
        if matrix.dim() != 2 or matrix.shape != x.shape or matrix.stride(1) != 1:
            raise ValueError(
                f"{name}: matrices must be of one shape [rows, size] with dense rows, got {list(matrix.shape)} with "
                f"strides {list(matrix.stride())} beside {list(x.shape)}"
            )
    if limit and not 1 <= x.shape[1] <= MAX_SIZE:
        raise ValueError(f"{name}: rows must have 1 to {MAX_SIZE} values, got {x.shape[1]}")
    given = [v for v in vectors if v is not None]
    for vector in given:
        if vector.shape != x.shape[1:] or not vector.is_contiguous():
            raise ValueError(
                f"{name}: a weight or bias must be a dense [{x.shape[1]}], got {list(vector.shape)} with strides "
                f"{list(vector.stride())}"
            )
    for tensor in (x, *(m for m in rows if m is not None), *given):
        if tensor.device != x.device or not tensor.is_cuda:
            raise ValueError(f"{name}: all tensors must be on one CUDA device, got {tensor.device} beside {x.device}")
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{name}: tensors must be float16, bfloat16 or float32, got {tensor.dtype}")

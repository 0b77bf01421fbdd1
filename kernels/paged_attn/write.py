"""Writing a step's keys and values into the paged cache, fused with q/k norm and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from qengine.kernels.fused.card import dependent_launch, launch_options
from qengine.kernels.fused.ref import rotate
from qengine.kernels.operator import operator

from .cache import KINDS, Kind, LayerCache, store_kv_ref
from .rotation import hadamard_block, rotate_heads
from .write_kernel import write_kv_kernel

_NORMS = {None: 0, "rms": 1, "layer": 2}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class WriteLaunch:
    """tokens, heads: of one program, powers of two. warps: of one program."""

    tokens: int
    heads: int
    warps: int


def write_kv_ref(
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    num_heads: int,
    head_norm: torch.Tensor | None = None,
    norm_kind: str = "rms",
    norm_eps: float = 1e-6,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Plain torch twin of `write_kv`: all arithmetic in float32, rounded once."""
    tokens, kv_heads = qkv.shape[0], cache.kv_heads
    heads = qkv.view(tokens, num_heads + 2 * kv_heads, cache.head_dim)
    qk = heads[:, :-kv_heads].float()
    if head_norm is not None:
        if norm_kind == "layer":
            qk = qk - qk.mean(-1, keepdim=True)
        qk = qk * (qk.square().mean(-1, keepdim=True) + norm_eps).rsqrt() * head_norm.float()
    if cos is not None and sin is not None:
        qk = rotate(qk, cos.float().view(tokens, 1, -1), sin.float().view(tokens, 1, -1), interleaved)
    if cache.axes is not None:
        qk = torch.cat([rotate_heads(part, cache.axes) for part in (qk[:, :num_heads], qk[:, num_heads:])], dim=1)
    heads[:, :num_heads] = qk[:, :num_heads].to(qkv.dtype)
    store_kv_ref(qk[:, num_heads:], heads[:, num_heads + kv_heads :], cache, slots)


def write_kv(
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    num_heads: int,
    head_norm: torch.Tensor | None = None,
    norm_kind: str = "rms",
    norm_eps: float = 1e-6,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Norm and rotate q's heads in place and k's on the way to the cache; write k and v to their slots.

    qkv [T, (Hq + 2 Hkv) * D] float16, bfloat16 or float32, the last dimension contiguous: Hq = num_heads query heads,
    then Hkv key heads, then Hkv value heads. On return q's part holds the finished queries; k's and v's are as they
    were. slots int64 [T]: block * block_size + offset; negative for padding, whose keys and values are not written.
    head_norm [Hq + Hkv, D]: the weight of a norm over each q and k head, "rms" or "layer" (without bias); None: none.
    cos, sin [T, R] or [T, 1, R]: the angles of layers/rope.py's Rotary, sin with its sign; the first R dimensions of a
    head turn. interleaved: pairs are (2i, 2i + 1) instead of (i, i + R/2). Where the cache rotates, finished queries
    and keys are rotated once more (rotation.py).

    All arithmetic is float32 and q is rounded once. Nothing waits for the device. Raises ValueError for what does not
    fit. CPU tensors are served by write_kv_ref; CUDA tensors never are.
    """
    _check(qkv, cache, slots, num_heads, head_norm, norm_kind, cos, sin, interleaved)
    _write_kv(
        qkv, cache.k, cache.v, cache.k_scale, cache.v_scale, slots, head_norm, cos, sin, cache.axes,
        cache.kind, num_heads, norm_kind, norm_eps, interleaved,
    )  # fmt: skip


def _check(
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    num_heads: int,
    head_norm: torch.Tensor | None,
    norm_kind: str,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Raise ValueError with what is wrong."""
    size, tokens = cache.head_dim, qkv.shape[0]
    width = (num_heads + 2 * cache.kv_heads) * size
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.dtype not in _FLOATS or (tokens and qkv.stride(1) != 1):
        wanted = f"[tokens, {width}] in float16, bfloat16 or float32 with rows contiguous"
        raise ValueError(f"write_kv: qkv must be {wanted}, got {list(qkv.shape)} {qkv.dtype} {qkv.stride()}")
    if slots.shape != (tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"write_kv: slots must be int64 [{tokens}], got {list(slots.shape)} {slots.dtype}")
    if norm_kind not in ("rms", "layer"):
        raise ValueError(f"write_kv: norm_kind={norm_kind!r}, must be 'rms' or 'layer'")
    shape = (num_heads + cache.kv_heads, size)
    if head_norm is not None and (head_norm.shape != shape or not head_norm.is_contiguous()):
        raise ValueError(f"write_kv: head_norm must be contiguous {list(shape)}, got {list(head_norm.shape)}")
    if (cos is None) != (sin is None):
        raise ValueError("write_kv: cos and sin come together")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles is None:
            continue
        turning = angles.shape[-1]
        fits = angles.numel() == tokens * turning and turning <= size and turning % 2 == 0
        if not fits or (tokens and (angles.shape[0] != tokens or angles.stride(-1) != 1)):
            raise ValueError(f"write_kv: {name} must be [{tokens}, R] with even R <= {size}, got {list(angles.shape)}")
    if cos is not None and sin is not None and cos.shape[-1] != sin.shape[-1]:
        raise ValueError(f"write_kv: cos {list(cos.shape)} and sin {list(sin.shape)} differ")
    if interleaved and size % 4:
        raise ValueError(f"write_kv: interleaved pairs need a head_dim that 4 divides, got {size}")
    if num_heads % cache.kv_heads:
        raise ValueError(f"write_kv: num_heads={num_heads} must be a multiple of the {cache.kv_heads} KV heads")
    for name, other in (("cache", cache.k), ("slots", slots), ("head_norm", head_norm), ("cos", cos), ("sin", sin)):
        if other is not None and other.device != qkv.device:
            raise ValueError(f"write_kv: qkv is on {qkv.device}, {name} on {other.device}")
    if qkv.is_cuda:
        _check_card(cache.kind, qkv)


def _check_card(kind: Kind, qkv: torch.Tensor) -> None:
    major, minor = torch.cuda.get_device_capability(qkv.device)
    sm = major * 10 + minor
    needed = {"bfloat16": 80, "fp8": 89}.get(kind, 75)
    if sm < needed:
        raise ValueError(
            f"write_kv: a {kind} cache needs compute capability {needed / 10}, this card has {sm / 10}; "
            f"use {'float16' if kind == 'bfloat16' else 'int8'}"
        )
    if sm < 80 and qkv.dtype == torch.bfloat16:
        raise ValueError(f"write_kv: bfloat16 needs compute capability 8.0, this card has {sm / 10}; use float16")


@operator("qengine::write_kv", mutates_args=("qkv", "k", "v", "k_scale", "v_scale"))
def _write_kv(
    qkv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slots: torch.Tensor,
    head_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    axes: torch.Tensor | None,
    kind: str,
    num_heads: int,
    norm_kind: str,
    norm_eps: float,
    interleaved: bool,
) -> None:
    known: Kind = next(name for name in KINDS if name == kind)
    size = k.shape[3] * 2 if kind == "int4" else k.shape[3]
    cache = LayerCache(k, v, k_scale, v_scale, known, k.shape[1], size, k.shape[2], axes is not None, axes)
    if qkv.is_cuda:
        if qkv.shape[0]:
            launch = choose_write(qkv.shape[0], num_heads, cache)
            run_write(launch, qkv, cache, slots, num_heads, head_norm, norm_kind, norm_eps, cos, sin, interleaved)
        return
    write_kv_ref(
        qkv, cache, slots, num_heads=num_heads, head_norm=head_norm, norm_kind=norm_kind, norm_eps=norm_eps,
        cos=cos, sin=sin, interleaved=interleaved,
    )  # fmt: skip


@_write_kv.register_fake
def _(
    qkv: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slots: torch.Tensor,
    head_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    axes: torch.Tensor | None,
    kind: str,
    num_heads: int,
    norm_kind: str,
    norm_eps: float,
    interleaved: bool,
) -> None:
    return None


def choose_write(tokens: int, num_heads: int, cache: LayerCache) -> WriteLaunch:
    """The launch for a step of `tokens` tokens: small programs while there are few, to spread over the card."""
    heads = min(4, triton.next_power_of_2(cache.kv_heads))
    programs = tokens * -(-num_heads // heads)
    together = 1 if programs <= (4096 if cache.kind == "int4" else 1024) else 2 if programs <= 8192 else 4
    size = heads * triton.next_power_of_2(cache.head_dim // 2) // 256
    return WriteLaunch(together, heads, max(1, min(8, size * min(together, 2))))


def write_constants(
    launch: WriteLaunch,
    kind: Kind,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    *,
    key_offsets: int,
    rotary_dim: int,
    interleaved: bool,
    norm: str | None,
    rotates: bool,
    pdl: bool = False,
) -> dict[str, int | str | bool]:
    """The kernel's constants. heads: (Hq, Hkv). rotary_dim: 0 for no rotary embedding. norm: None, "rms" or "layer".

    pdl: launched so that it may start before the kernel ahead of it ends.
    """
    return {
        "HQ": heads[0],
        "HKV": heads[1],
        "D": head_dim,
        "HALF": triton.next_power_of_2(head_dim // 2),
        "R": rotary_dim,
        "INTERLEAVED": interleaved,
        "NORM": _NORMS[norm],
        "KIND": kind,
        "KEY_OFFSETS": key_offsets,
        "ROTATE": rotates,
        "STEPS": hadamard_block(head_dim).bit_length() - 1 if rotates else 0,
        "BS": block_size,
        "TURN_Q": bool(rotary_dim or norm or rotates),
        "BT": launch.tokens,
        "HG": launch.heads,
        "PDL": pdl,
    }


def write_grid(launch: WriteLaunch, tokens: int, heads: tuple[int, int], turn_q: bool) -> tuple[int, int]:
    """(token groups, parts): parts of q where it changes, of k and of v."""
    query = -(-heads[0] // launch.heads) if turn_q else 0
    return -(-tokens // launch.tokens), query + 2 * -(-heads[1] // launch.heads)


def run_write(
    launch: WriteLaunch,
    qkv: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    num_heads: int,
    head_norm: torch.Tensor | None,
    norm_kind: str,
    norm_eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Launch the kernel as told; the arguments are `write_kv`'s, checked."""
    heads = (num_heads, cache.kv_heads)
    k_scale, v_scale, offsets = cache.k_scale, cache.v_scale, 1
    if cache.kind == "int4" and k_scale is not None and v_scale is not None:
        offsets = k_scale.shape[3] // 2
        k_scale = k_scale.view(torch.int64 if offsets == 2 else torch.int32)
        v_scale = v_scale.view(torch.int32)
    pdl = dependent_launch(qkv.device)
    constants = write_constants(
        launch, cache.kind, heads, cache.head_dim, cache.block_size, key_offsets=offsets,
        rotary_dim=0 if cos is None else cos.shape[-1], interleaved=interleaved,
        norm=None if head_norm is None else norm_kind, rotates=cache.axes is not None, pdl=pdl,
    )  # fmt: skip
    write_kv_kernel[write_grid(launch, qkv.shape[0], heads, bool(constants["TURN_Q"]))](
        qkv,
        cache.k,
        cache.v,
        qkv if k_scale is None else k_scale,
        qkv if v_scale is None else v_scale,
        slots,
        qkv if head_norm is None else head_norm,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        slots if cache.axes is None else cache.axes,
        qkv.shape[0],
        qkv.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        cache.k.stride(0),
        0 if k_scale is None else k_scale.stride(0),
        0 if v_scale is None else v_scale.stride(0),
        norm_eps,
        **constants,
        num_warps=launch.warps,
        num_stages=1,
        **launch_options(pdl),
    )

"""Compiling the cache write for a card that is not here."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import turing

from .cache import Kind
from .write import WriteLaunch, write_constants
from .write_kernel import write_kv_kernel

_VALUES = {"float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "int4": "*u8", "fp8": "*fp8e4nv"}
_STRIDES = ("qkv_stride", "cos_stride", "sin_stride", "block_stride")
_INTEGERS = ("tokens", *_STRIDES, "k_scale_stride", "v_scale_stride")


def compile_write(
    launch: WriteLaunch,
    sm: int,
    kind: Kind,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int = 16,
    *,
    key_offsets: int = 1,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    norm: str | None = None,
    rotates: bool | None = None,
    dtype: str = "fp16",
) -> triton.compiler.CompiledKernel:
    """The kernel of `launch` for capability `sm`, as `write_kv` would launch it on aligned tensors.

    heads: (Hq, Hkv). rotary_dim: None turns the whole head. rotates: None is the kind's default. dtype: of qkv and the
    angles, fp16 or bf16.
    """
    turing.ensure(sm)
    constants = write_constants(
        launch, kind, heads, head_dim, block_size, key_offsets=key_offsets,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim, interleaved=interleaved, norm=norm,
        rotates=kind == "int4" if rotates is None else rotates,
    )  # fmt: skip
    types = {
        **dict.fromkeys(("qkv_ptr", "cos_ptr", "sin_ptr"), f"*{dtype}"),
        **dict.fromkeys(("k_ptr", "v_ptr"), _VALUES[kind]),
        "k_scale_ptr": "*fp16" if kind != "int4" else "*i64" if key_offsets == 2 else "*i32",
        "v_scale_ptr": "*i32" if kind == "int4" else "*fp16",
        "axes_ptr": "*i32",
        **dict.fromkeys(_INTEGERS, "i32"),
        "slots_ptr": "*i64",
        "norm_ptr": "*fp32",
        "eps": "fp32",
    }
    names = write_kv_kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types.get(name, "").startswith("*") or name in _STRIDES
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(write_kv_kernel, signature, constants, aligned)
    options = {"num_warps": launch.warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)

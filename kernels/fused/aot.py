"""Compiling the fused kernels for a card that is not here, in every form that the engine launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import sass

from .activation import KINDS, act_and_mul_kernel
from .embedding import embedding_kernel
from .norm import norm_kernel, shape_for
from .rotary import rotary_kernel

_INTEGERS = ("H", "size", "blocks", "vocabulary", "count", "half")
_WIDTHS = {"fp16": 2, "bf16": 2, "fp32": 4}
SIZES = (576, 3584, 4096, 8192, 16384)


@dataclass(frozen=True)
class Variant:
    """One form of a kernel. pointers: argument -> element type. constants: its constexprs but PDL."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    floats: tuple[str, ...] = ()
    takes_pdl: bool = True


def compile_variant(variant: Variant, sm: int) -> triton.compiler.CompiledKernel:
    """The kernel for capability `sm`, as it would be launched with sizes and strides that are multiples of 16."""
    names = variant.kernel.arg_names
    types = {name: f"*{dtype}" for name, dtype in variant.pointers.items()}
    types |= dict.fromkeys(variant.floats, "fp32")
    types |= {name: "i32" for name in names if name in _INTEGERS or name.endswith("stride")}
    constants = variant.constants | ({"PDL": sm >= 90} if variant.takes_pdl else {})
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types.get(name, "").startswith("*") or name in ("H", "size", "half") or name.endswith("stride")
    }
    source = ASTSource(variant.kernel, {name: types.get(name, "constexpr") for name in names}, constants, even)
    options = {"num_warps": variant.warps, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def inspect_variant(variant: Variant, sm: int) -> tuple[sass.Code, int]:
    """(machine code read, bytes of shared memory) of a variant compiled for `sm`."""
    kernel = compile_variant(variant, sm)
    return sass.read(kernel.asm["cubin"]), kernel.metadata.shared


def norm_variant(
    size: int, stream: str, delta: str | None, weight: str, out: str | None, rows: int = 1, *, kind: str = "rms",
    inner: bool = False, second: bool = False, bias: bool = False,
) -> Variant:  # fmt: skip
    """A norm over `size` values; dtypes of hidden, delta, weights and out: "fp16", "bf16", "fp32", or None: absent."""
    shape = shape_for(size, rows, {_WIDTHS[t] for t in (stream, delta, weight, out) if t})
    pointers = dict.fromkeys(("delta_ptr", "second_ptr"), delta or stream)
    pointers |= dict.fromkeys(("inner_ptr", "weight_ptr", "bias_ptr"), weight)
    has = {"HAS_DELTA": delta is not None, "HAS_SECOND": second, "HAS_INNER": inner, "HAS_OUT": out is not None}
    constants = {
        "BLOCK": shape.block, "VECTOR": shape.vector, "EARLY": shape.early, "KIND": kind, "HAS_WEIGHT": True,
        "HAS_BIAS": bias, **has,
    }  # fmt: skip
    forms = [kind, *(name[4:].lower() for name, on in has.items() if on), *(["bias"] if bias else [])]
    return Variant(
        f"norm {size} {'+'.join(forms)} {stream} {delta} {weight} {out}, {shape.warps} warps",
        norm_kernel,
        {"hidden_ptr": stream, **pointers, "out_ptr": out or stream},
        constants,
        shape.warps,
        ("inner_eps", "eps"),
    )


def activation_variant(kind: str, dtype: str, block: int = 1024, warps: int = 2) -> Variant:
    """act(gate) * up in one dtype."""
    pointers = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), dtype)
    constants = {"KIND": kind, "BLOCK": block, "LIB": True, "PAIRED": False}
    return Variant(f"{kind} {dtype}", act_and_mul_kernel, pointers, constants, warps)


def embedding_variant(table: str, out: str, scaled: bool) -> Variant:
    """Rows of a table of one dtype in another."""
    pointers = {"ids_ptr": "i64", "table_ptr": table, "out_ptr": out}
    name = f"embedding {table} {out}{' scaled' if scaled else ''}"
    return Variant(name, embedding_kernel, pointers, {"BLOCK": 4096, "SCALED": scaled}, 4, ("scale",))


def rotary_variant(dtype: str, interleaved: bool) -> Variant:
    """Angles in one dtype."""
    pointers = {"positions_ptr": "i64", "inverse_ptr": "fp32", "cos_ptr": dtype, "sin_ptr": dtype}
    constants = {"INTERLEAVED": interleaved, "BLOCK": 256, "FUSED": True}
    name = f"rotary {dtype}{' interleaved' if interleaved else ''}"
    return Variant(name, rotary_kernel, pointers, constants, 4, ("factor",), takes_pdl=False)


def variants() -> Iterator[Variant]:
    """Every kind of kernel that a model can ask for, at each of SIZES where the size matters."""
    for size in SIZES:
        for rows in (1, 256):
            for dtype in ("fp16", "bf16"):
                yield norm_variant(size, dtype, None, dtype, dtype, rows)
                yield norm_variant(size, dtype, dtype, dtype, dtype, rows)
                yield norm_variant(size, dtype, dtype, dtype, dtype, rows, kind="layer", second=True, bias=True)
                yield norm_variant(size, dtype, dtype, dtype, dtype, rows, inner=True)
                yield norm_variant(size, dtype, dtype, dtype, None, rows, inner=True)
            yield norm_variant(size, "fp32", "fp16", "fp32", "fp16", rows, inner=True)
            yield norm_variant(size, "fp32", "fp32", "fp32", "fp32", rows, kind="layer", second=True, bias=True)
    for kind in sorted(set(KINDS.values())):
        for dtype in ("fp16", "bf16", "fp32"):
            yield activation_variant(kind, dtype)
    for table in ("fp16", "bf16", "fp32"):
        for out in ("fp16", "bf16", "fp32"):
            yield embedding_variant(table, out, scaled=True)
    for dtype in ("fp16", "bf16", "fp32"):
        for interleaved in (False, True):
            yield rotary_variant(dtype, interleaved)


def over_budget(code: sass.Code, shared: int, threads: int) -> list[str]:
    """What of a kernel exceeds what the fused kernels may take: no stack, 64 KiB, all its threads on one Turing SM."""
    found = []
    if code.stack:
        found.append(f"{code.stack} bytes of stack")
    if shared > 65536:
        found.append(f"{shared} bytes of shared memory")
    if code.registers * threads > 65536:
        found.append(f"{code.registers} registers for each of {threads} threads")
    return found

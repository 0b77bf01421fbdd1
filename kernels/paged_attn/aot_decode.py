"""Compiling a launch of the decode kernel for a card that is not here, and reading what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import sass, turing

from .decode_kernel import paged_decode_kernel
from .decode_launch import DecodeLaunch, DecodeShape

_INTEGERS = ("rows", "window", "sq16", "so", "st", "stride16", "min_tiles")
_TYPES = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "table_ptr", "len_ptr", "lock_ptr"), "*i32"),
    **dict.fromkeys(("ks_ptr", "vs_ptr"), "*fp16"),
    **dict.fromkeys(("part_ptr", "stat_ptr"), "*fp32"),
    **dict.fromkeys(("to_score", "cap"), "fp32"),
    **dict.fromkeys(_INTEGERS, "i32"),
}


@dataclass(frozen=True)
class Compiled:
    """A launch's machine code, bytes of shared memory, and cached elements that a lane takes in a turn of its loop."""

    code: sass.Code
    shared: int
    elements: float

    @property
    def loop(self) -> sass.Loop:
        """The loop over tiles: the shortest of those with the most tensor-core instructions."""
        return self.code.main_loop()

    @property
    def instructions(self) -> float:
        """Instructions of the loop for each cached element (of K or V)."""
        return self.loop.total / self.elements


def compile_decode(
    shape: DecodeShape,
    launch: DecodeLaunch,
    sm: int,
    *,
    dtype: str = "fp16",
    kv_heads: int = 4,
    softcap: bool = False,
    window: bool = False,
) -> triton.compiler.CompiledKernel:
    """The kernel of a launch for capability `sm`, as the operator would launch it. dtype: fp16 or bf16, of q and out.

    The stride of out counts as a multiple of 16, as the models' are.
    """
    turing.ensure(sm)
    types = {**_TYPES, "out_ptr": f"*{dtype}"}
    constants = {
        **shape.constants(launch, kv_heads),
        "QBF": dtype == "bf16",
        "SB": 256,
        "HAS_CAP": softcap,
        "HAS_WINDOW": window,
        "ASM": True,
    }
    names = paged_decode_kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types.get(name, "").startswith("*") or name == "so"
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(paged_decode_kernel, signature, constants, aligned)
    options: dict[str, int] = {"num_warps": launch.warps, "num_stages": 1}
    if launch.registers is not None:
        options["maxnreg"] = launch.registers
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def inspect_decode(shape: DecodeShape, launch: DecodeLaunch, sm: int) -> Compiled:
    """What a launch compiled for `sm` holds."""
    kernel = compile_decode(shape, launch, sm)
    elements = 2 * launch.tokens * shape.padded / 32
    return Compiled(sass.read(kernel.asm["cubin"]), kernel.metadata.shared, elements)

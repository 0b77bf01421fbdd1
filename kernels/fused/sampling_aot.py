"""Compiling the sampler's kernels for a card that is not here, as sampling.py launches them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import sass

from .sampling import TURING, Shape
from .sampling_cut_kernel import finish_cut, finish_list
from .sampling_flat_kernel import finish_flat
from .sampling_kernel import block_stats, finish_plain
from .sampling_logprobs_kernel import finish_logprobs, raw_stats
from .sampling_rules_kernel import change_entries, change_rows, count_tokens
from .sampling_wide_kernel import choose_range, finish_wide, gather_range, tally_blocks

_DOUBLES = ("params", "ruled", "entries", "rows", "sums", "state")
_INTEGERS = ("groups", "list", "left", "tcount", "rank", "starts", "masks")
_LONGS = ("tokens",)
VOCABULARY = 152_064
GROUPS = 8192
"""finish_cut's and finish_logprobs' padded groups for up to 262,144 tokens."""


@dataclass(frozen=True)
class Variant:
    """One form of a kernel: its constexprs and warps."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int


def _element(name: str, logits: str, kernel: Any) -> str:
    stem = name.removesuffix("_ptr")
    if stem == "logits":
        return logits
    if stem == "out":
        return "i32" if kernel is finish_logprobs else "i64"
    if stem == "counts":
        return "i16"
    groups = {"fp64": _DOUBLES, "i32": _INTEGERS, "i64": _LONGS}
    return next((element for element, stems in groups.items() if stem in stems), "fp32")


def variants(shape: Shape = TURING) -> Iterator[Variant]:
    """Every kernel with the launch constants of a large vocabulary, with and without rules."""
    steps = triton.next_power_of_2(triton.cdiv(VOCABULARY, shape.step))
    warps = shape.warps
    size: dict[str, Any] = {"BLOCK": shape.block, "GROUP": shape.group}
    for rules in (False, True):
        more: dict[str, Any] = {"NB": 64, "RULES": rules}
        mark = ", rules" if rules else ""
        for sums, cuts in ((False, False), (True, False), (True, True)):
            kind = "cuts" if cuts else "sums" if sums else "greedy"
            stats = {**size, "SUMS": sums, "CUTS": cuts, "RULES": rules}
            yield Variant(f"block_stats {kind}{mark}", block_stats, stats, warps[0])
        plain = {"BLOCK": shape.block, "DRAWS": True, **more}
        yield Variant(f"finish_plain{mark}", finish_plain, plain, warps[1])
        cut = {"NG": GROUPS, "CHUNK": shape.chunk, "TILE": shape.tile, "LIST": shape.list, "GROUP": shape.group, **more}
        yield Variant(f"finish_cut{mark}", finish_cut, cut, warps[2])
        flat = {"PIVOTS": shape.pivots, "STEP": shape.step, "STEPS": steps, "LIST": shape.list, **more}
        yield Variant(f"finish_flat{mark}", finish_flat, flat, warps[4])
        wide = {"BLOCK": shape.block, "LIST": shape.list, **more}
        tally = {"BLOCK": shape.block, "PIVOTS": shape.rays, "SECOND": False, "PART": shape.part, "RULES": rules}
        yield Variant(f"tally_blocks{mark}", tally_blocks, tally, warps[5])
        yield Variant(f"gather_range{mark}", gather_range, wide, 8)
        yield Variant(f"finish_wide{mark}", finish_wide, {**wide, "PIVOTS": shape.rays}, warps[6])
    yield Variant("finish_list", finish_list, {"NB": 64, "LIST": shape.list}, warps[3])
    yield Variant("choose_range", choose_range, {"SECOND": True, "NB": 64, "PIVOTS": shape.rays}, 4)
    yield Variant("change_rows", change_rows, {"BLOCK": shape.block}, 4)
    yield Variant("change_entries", change_entries, {"BLOCK": shape.block, "PART": 256}, 4)
    yield Variant("count_tokens", count_tokens, {"PART": 128}, 4)
    yield Variant("raw_stats", raw_stats, {**size, "TOP": True}, 4)
    yield Variant("finish_logprobs", finish_logprobs, {"NB": 64, "NG": GROUPS, "GROUP": shape.group, "TOP": True}, 8)


def compile_variant(variant: Variant, sm: int, logits: str = "fp32") -> triton.compiler.CompiledKernel:
    """The kernel for capability `sm` and fp32 or fp16 logits, with row strides that are multiples of 16."""
    names = variant.kernel.arg_names
    types = {
        name: f"*{_element(name, logits, variant.kernel)}" if name.endswith("_ptr") else "i32"
        for name in names
        if name not in variant.constants
    }
    even = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr") or "stride" in name
    }
    source = ASTSource(
        variant.kernel, {name: types.get(name, "constexpr") for name in names}, variant.constants, even
    )  # fmt: skip
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def inspect_variant(variant: Variant, sm: int, logits: str = "fp32") -> tuple[sass.Code, int]:
    """(machine code read, bytes of shared memory) of a variant compiled for `sm`."""
    kernel = compile_variant(variant, sm, logits)
    return sass.read(kernel.asm["cubin"]), kernel.metadata.shared

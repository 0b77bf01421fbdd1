"""The fused kernels compiled for Turing without a GPU: no stack, wide loads, registers and shared memory in bounds."""

import re

import pytest

from qengine.kernels import sass
from qengine.kernels.fused import aot

CASES = [
    aot.norm_variant(3584, "fp16", "fp16", "fp16", "fp16", 1),
    aot.norm_variant(4096, "fp16", "fp16", "fp16", "fp16", 256),
    aot.norm_variant(4608, "fp32", "fp16", "fp32", "fp16", 1, inner=True),
    aot.norm_variant(2560, "fp32", "fp16", "fp32", "fp16", 256, inner=True),
    aot.norm_variant(16384, "fp32", "fp32", "fp32", "fp32", 1, kind="layer", second=True, bias=True),
    aot.norm_variant(16384, "bf16", "bf16", "bf16", "bf16", 256, inner=True),
    aot.activation_variant("silu", "fp16"),
    aot.activation_variant("gelu_tanh", "fp32"),
    aot.activation_variant("gelu", "bf16"),
    aot.embedding_variant("bf16", "fp32", scaled=True),
    aot.rotary_variant("fp16", interleaved=False),
]


@pytest.mark.parametrize("variant", CASES, ids=lambda v: v.name)
def test_a_variant_is_within_its_budget_on_turing(variant: aot.Variant) -> None:
    kernel = aot.compile_variant(variant, 75)
    code = sass.read(kernel.asm["cubin"])
    assert aot.over_budget(code, kernel.metadata.shared, variant.warps * 32) == []
    assert not code.loops, "a fused kernel takes each value once"
    if variant.kernel is not aot.rotary_kernel:
        text = sass.disassemble(kernel.asm["cubin"])
        widths = {op: re.findall(rf"\b{op}\.E\.(\d+)", text) for op in ("LDG", "STG")}
        wide = "64" if 4 in variant.constants.values() or "bf16 fp32" in variant.name else "128"
        assert wide in widths["LDG"], widths
        assert set(widths["STG"]) <= {"64", "128"}, widths
        assert widths["STG"], widths


def test_the_budget_sees_what_exceeds_it() -> None:
    code = sass.Code(registers=200, stack=16, total=10, loops=())
    assert len(aot.over_budget(code, 70000, 512)) == 3


def test_every_form_has_a_name_of_its_own() -> None:
    names = [variant.name for variant in aot.variants()]
    assert len(names) > 150
    assert len({n for n in names if "norm" not in n}) == len([n for n in names if "norm" not in n])

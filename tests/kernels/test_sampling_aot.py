"""The sampler's kernels compiled for Turing without a card: no stack, shared memory within 64 KiB, wide loads."""

import pytest
import torch

from qengine.kernels import sass
from qengine.kernels.fused import sampling
from qengine.kernels.fused.sampling_aot import Variant, compile_variant, variants

# rules double the time of compiling and add nothing that these do not show
PLAIN = [v for v in variants() if "rules" not in v.name]


@pytest.mark.parametrize("variant", PLAIN, ids=lambda v: v.name.replace(" ", "_"))
def test_turing_code_has_no_stack_and_fits(variant: Variant) -> None:
    kernel = compile_variant(variant, 75)
    code = sass.read(kernel.asm["cubin"])
    assert code.stack == 0
    assert kernel.metadata.shared <= 64 << 10
    if variant.name.startswith(("block_stats", "raw_stats")):
        assert "LDG.E.128" in sass.disassemble(kernel.asm["cubin"]), "logits must be read 16 bytes at a time"


def test_turing_gets_the_constants_that_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for sm, shape in ((75, sampling.TURING), (80, sampling.Shape()), (90, sampling.Shape())):
        monkeypatch.setattr(sampling, "capability", lambda _, sm=sm: sm)
        assert sampling.shape_for(torch.device("cuda", 0)) == shape
    assert sampling.shape_for(torch.device("cpu")) == sampling.Shape()


def test_every_kernel_has_a_form_with_rules_where_it_reads_logits() -> None:
    assert len({v.name.split(",")[0] for v in variants()}) == len(PLAIN) == 16

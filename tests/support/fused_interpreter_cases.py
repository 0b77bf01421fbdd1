"""Run with TRITON_INTERPRET=1: the fused kernels on CPU tensors, case by case. Prints what failed."""

from __future__ import annotations

import sys
import warnings

import torch
from fused_cases import BF16, F16, F32, NORMS, NormCase, angles_want, beside, gates, make_norm, matrix, wrong

from qengine.kernels.fused import ref
from qengine.kernels.fused.activation import KINDS, run_act_and_mul
from qengine.kernels.fused.embedding import run_embedding
from qengine.kernels.fused.norm import Shape, run_norm
from qengine.kernels.fused.rotary import run_rotary

# the interpreter cuts bfloat16 off where a GPU rounds it: every value may be off, by a unit a rounding
LOOSE = {"ulps": 3.0, "share": 1.0}


def limits(*dtypes: torch.dtype) -> dict:
    return LOOSE if BF16 in dtypes else {"ulps": 2.0}


def norm(case: NormCase, shape: Shape | None = None) -> str:
    made = make_norm(case)
    out = None if made.want is None else torch.full_like(matrix(case.rows, case.size, F32, "cpu"), float("nan"))
    out = None if out is None else torch.full((case.rows, case.size + 16), float("nan")).to(case.out)[:, 8:-8]
    run_norm(
        made.hidden, out, made.weight, made.bias, made.eps, case.kind, delta=made.delta, second=made.second,
        inner=made.inner, inner_eps=made.inner_eps, shape=shape,
    )  # fmt: skip
    if not beside(made.hidden) or (out is not None and not beside(out)):
        return "wrote beside its rows"
    found = wrong(made.hidden, made.want_hidden, **limits(case.stream, case.weight or case.stream))
    if found or out is None or made.want is None:
        return found
    return wrong(out, made.want, **limits(case.stream, case.weight or case.stream, case.out))


def activation(name: str, rows: int, size: int, dtype: torch.dtype, block: int) -> str:
    gate, up = gates(rows, size, dtype, "cpu"), matrix(rows, size, dtype, "cpu")
    out = torch.full((rows, size + 16), float("nan")).to(dtype)[:, 8:-8]
    run_act_and_mul(gate, up, out, name, launch=(block, 4))
    if not beside(out):
        return "wrote beside its rows"
    # float32: libraries differ in the last places, more so near the functions' zeros
    if dtype == F32:
        return "" if torch.allclose(out, ref.act_and_mul(gate, up, name), rtol=3e-6, atol=3e-7) else "off"
    return wrong(out, ref.act_and_mul(gate, up, name), **(LOOSE if dtype == BF16 else {"ulps": 2.0, "share": 0.1}))


def paired(name: str, rows: int, size: int) -> str:
    both = matrix(rows, 2 * size, F16, "cpu")
    out, want = (torch.full((rows, size + 16), float("nan")).to(F16)[:, 8:-8] for _ in range(2))
    run_act_and_mul(both, both[:, 8:], out, name, launch=(32, 4), paired=True)
    gate, up = (part.flatten(1) for part in both.reshape(rows, -1, 2, 8).unbind(2))
    run_act_and_mul(gate, up, want, name, launch=(32, 4))
    if not beside(out):
        return "wrote beside its rows"
    return "" if torch.equal(out, want) else "not those of gate and up apart"


def embedding(table_dtype: torch.dtype, dtype: torch.dtype, scale: float, kind: torch.dtype) -> str:
    table = matrix(7, 40, table_dtype, "cpu")
    ids = torch.tensor([0, 6, -1, 7, 3, 3, 2**31 - 1, -(2**31)], dtype=kind)
    out = torch.full((8, 56), float("nan")).to(dtype)[:, 8:-8]
    run_embedding(ids, table, scale, out, launch=(16, 1))
    if not beside(out):
        return "wrote beside its rows"
    want = ref.embed(ids, table, scale, dtype)
    if not (out[[2, 3, 6, 7]] == 0).all():
        return "rows of unknown ids are not 0"
    return wrong(out, want, **(LOOSE if dtype == BF16 else {"ulps": 0.0, "share": 0.0}))


def rotary(half: int, dtype: torch.dtype, interleaved: bool, factor: float, wide: bool) -> str:
    ends = torch.tensor([0, 1, 2, 4095, 131072 * 8 - 1, 999_983])
    positions = torch.cat((ends, torch.randint(0, 131072 * 8, (300,)), torch.randint(0, 4096, (95,))))
    inverse = 1 / 10000.0 ** (torch.arange(half) / half)
    if wide:
        inverse = inverse * torch.rand(len(positions), 1)
    cos, sin = (torch.full((len(positions), 1, 2 * half), float("nan")).to(dtype) for _ in range(2))
    run_rotary(positions, inverse, factor, cos, sin, interleaved, launch=(2048, 4))
    tolerance = {F16: 2.5e-4 * max(factor, 1), F32: 8e-8 * factor + (2**-24 if factor != 1.0 else 0)}[dtype]
    for got, want in zip((cos, sin), angles_want(positions, inverse, factor, interleaved), strict=True):
        worst = float((got[:, 0].double() - want).abs().max())
        if not worst <= tolerance:
            return f"off by {worst}"
    return ""


def cases():
    """(name, what is amiss) of every case."""
    for case in NORMS:
        yield str(case), norm(case)
    yield "vectors of 4, late weights", norm(NORMS[-1], Shape(512, 4, False, 4))
    names = {kind: name for name, kind in KINDS.items()}
    for name in names.values():
        yield f"{name} float16", activation(name, 3, 100, F16, 64)
        yield f"{name} float32", activation(name, 2, 33, F32, 32)
    yield "silu bfloat16", activation("silu", 2, 64, BF16, 64)
    yield "silu of eights by turns", paired("silu", 3, 72)
    yield "embedding float16", embedding(F16, F16, 1.0, torch.int64)
    yield "embedding bfloat16 to float16, scaled", embedding(BF16, F16, 3.3, torch.int32)
    yield "embedding float32 to float16, scaled", embedding(F32, F16, 3.3, torch.int64)
    yield "embedding float16 to float32, scaled", embedding(F16, F32, 33.3, torch.int64)
    yield "rotary float32", rotary(32, F32, False, 1.0, False)
    yield "rotary float32 interleaved, odd", rotary(13, F32, True, 1.3, True)
    yield "rotary float16", rotary(40, F16, False, 0.9, True)


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    failed = count = 0
    for name, amiss in cases():
        count += 1
        if amiss:
            failed += 1
            print(f"FAILED {name}: {amiss}")
    print(f"{count - failed} cases passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())

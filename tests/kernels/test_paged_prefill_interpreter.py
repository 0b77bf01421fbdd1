"""The paged prefill kernels in Triton's interpreter, on the CPU, against float32 attention.

The interpreter is chosen when a kernel is decorated, so the cases run in a process of their own: this file as a script.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
# Triton 3.6's interpreter fails at loops with a tensor bound under numpy 2.4 and later: 0-dimensional arrays only.
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
NEW_NUMPY = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)


@pytest.mark.skipif(OLD and NEW_NUMPY, reason="Triton 3.6's interpreter needs numpy 2.3 or older")
def test_every_case_agrees_in_the_interpreter() -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore", PYTHONPATH=path)
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cases passed" in done.stdout


def main() -> int:
    """Run all cases; the number of failures is the exit status."""
    import prefill_cases
    from prefill_cases import TOLERANCE, Case

    from qengine.kernels.paged_attn.prefill import run_prefill
    from qengine.kernels.paged_attn.prefill_launch import PrefillLaunch
    from qengine.kernels.paged_attn.prefill_tiles import prefill_tiles

    bf16 = torch.bfloat16
    mixed = ((40, 30), (1, 3), (0, 5), (17, 60))
    tile = PrefillLaunch(bm=32, bn=32, pack=2, warps=4)
    ahead = PrefillLaunch(bm=32, bn=16, pack=1, prefetch=True)
    cases = [
        (Case(), tile),
        (Case(window=7), tile),
        (Case(softcap=5.0, window=40, lens=mixed), tile),
        (Case(kind="int8", lens=mixed), tile),
        (Case(kind="int4", head_dim=96, window=30, lens=mixed), tile),
        (Case(kind="int4", head_dim=96, window=30, lens=mixed, offsets=2), tile),
        (Case(kind="int4", head_dim=128, block_size=64, dtype=bf16, offsets=2), tile),
        (Case(kind="int4", head_dim=80, block_size=8, softcap=5.0, lens=mixed, offsets=2), ahead),
        (Case(kind="fp8", block_size=64), tile),
        (Case(head_dim=80, block_size=64, lens=((70, 21),)), tile),
        (Case(head_dim=112, heads=6, block_size=8), PrefillLaunch(bm=32, bn=16, pack=3)),
        (Case(head_dim=192, block_size=8), tile),
        (Case(head_dim=192, block_size=8), PrefillLaunch(bm=32, bn=32, pack=2, whole=True)),
        (Case(head_dim=256, block_size=32, heads=2), PrefillLaunch(bm=16, bn=16, pack=1)),
        (Case(kind="int8", head_dim=80, block_size=8, lens=((30, 0),), dtype=bf16), tile),
        (Case(kind="bfloat16", dtype=bf16), tile),
        (Case(head_dim=256, lens=mixed, window=30), PrefillLaunch(bm=32, bn=16, pack=2, sums=True)),
        (Case(head_dim=192, block_size=8), PrefillLaunch(bm=32, bn=16, pack=2, sums=True, prefetch=True)),
        (Case(kind="int4", softcap=5.0, lens=((50, 33), (0, 5))), PrefillLaunch(bm=16, bn=16, pack=2, sums=True)),
        (Case(window=19, lens=((50, 33), (9, 0))), ahead),
        (Case(kind="int4", lens=((50, 33), (9, 0))), ahead),
        (Case(kind="int8", window=5, block_size=128), ahead),
        (Case(heads=6, window=19, lens=((50, 33), (9, 0))), PrefillLaunch(bm=64, bn=16, pack=3, split=False)),
        (Case(heads=7, kv_heads=1, lens=((3, 40), (2, 0))), PrefillLaunch(bm=32, bn=16, pack=7)),
    ]
    failed = 0
    for case, launch in cases:
        step = prefill_cases.make(case)
        run_prefill(
            step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out, launch,
            max_query_len=max(n for n, _ in case.lens), **step.options, asm=False,
        )  # fmt: skip
        value = prefill_cases.error(step, case)
        # the interpreter cuts bfloat16 off where a GPU rounds it
        if not value < TOLERANCE[(case.kind, case.dtype)] * (2 if case.dtype == bf16 else 1):
            failed += 1
            print(f"FAILED {case} {launch}: relative error {value:.2e}")
    for launch in (tile, ahead):
        step = prefill_cases.make(Case(lens=mixed, block_size=64))
        step.seq_lens[0] = 0
        step.block_tables[0] = 2**28
        run_prefill(
            step.q, step.cache, step.block_tables, step.seq_lens, step.query_starts, step.out, launch, max_query_len=40,
            **step.options, asm=False,
        )  # fmt: skip
        if not bool((step.out[3:43] == 0).all()) or step.out[43:61].isnan().any():
            failed += 1
            print(f"FAILED a sequence without keys {launch}")
    if not ordered(prefill_tiles):
        failed += 1
        print("FAILED the order of tiles")
    print(f"{len(cases) + 3 - failed} cases passed")
    return failed


def ordered(prefill_tiles) -> bool:
    """Whether 40 random chunks' tiles come once each, the most keys first."""
    lens = torch.randint(0, 90, (40, 2)).tolist()
    starts = torch.tensor([5, *(5 + sum(n for n, _ in lens[: i + 1]) for i in range(40))], dtype=torch.int32)
    lengths = torch.tensor([n + c for n, c in lens], dtype=torch.int32)
    entries = prefill_tiles(starts, lengths, int(starts[-1]) + 9, 9).tolist()
    ends = {(p, t): c + min(n, 9 * (t + 1)) for p, (n, c) in enumerate(lens) for t in range(-(-n // 9))}
    got, rest = [tuple(e[:2]) for e in entries[: len(ends)]], entries[len(ends) :]
    keys = [ends.get(t, -1) for t in got]
    places = all(e[2:5] == [int(starts[e[0]]), *lens[e[0]]] for e in entries[: len(ends)])
    return sorted(got) == sorted(ends) and keys == sorted(keys, reverse=True) and places and all(e[0] < 0 for e in rest)


if __name__ == "__main__":
    sys.exit(main())

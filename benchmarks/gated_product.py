"""Time gate and up with their activation in the product's epilogue, beside the product and the activation apart.

    python benchmarks/gated_product.py
    python benchmarks/gated_product.py --launches     # other launches for 48 and 96 rows, four rounds each

For each shape and batch: microseconds of the product alone, of product and act_and_mul one after the other, and of the
gated product, all with the launch that the engine would choose; then the last over the middle one. Weights are rotated
so that they come from memory (fewer of them from 512 rows on).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch

from qengine.kernels.fused.activation import run_act_and_mul
from qengine.kernels.launch import Launch
from qengine.kernels.w4a16.layout import W4A16Weight
from qengine.kernels.w4a16.ops import choose, run
from qengine.kernels.w4a16.tuning import random_weight, time_graph

SHAPES = {"llama": (22016, 4096), "qwen": (37888, 3584)}
ROWS = (1, 8, 16, 32, 46, 64, 96, 128, 160, 192, 256, 512, 768, 1024, 2048)
REPLAYS = 7
ROUNDS = 4


def measure(m: int, weights: list[W4A16Weight]) -> tuple[float, float, float]:
    """Microseconds of (the product, product and activation, the gated product) for m rows."""
    n, k = weights[0].n, weights[0].k
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    both = torch.empty(m, n, device="cuda", dtype=torch.float16)
    out = both.new_empty(m, n // 2)
    launch = choose(m, weights[0], x.device)

    def apart(weight: W4A16Weight) -> None:
        run(x, weight, None, both, launch)
        run_act_and_mul(both[:, : n // 2], both[:, n // 2 :], out, "silu")

    return (
        time_graph([partial(run, x, w, None, both, launch) for w in weights], REPLAYS),
        time_graph([partial(apart, w) for w in weights], REPLAYS),
        time_graph([partial(run, x, w, None, out, launch, "silu") for w in weights], REPLAYS),
    )


def launches(m: int, weights: list[W4A16Weight]) -> None:
    """Print the product's and the gated product's microseconds with launches near those chosen for m and 64 rows."""
    x = torch.randn(m, weights[0].k, device="cuda", dtype=torch.float16)
    both = torch.empty(m, weights[0].n, device="cuda", dtype=torch.float16)
    out = both.new_empty(m, weights[0].n // 2)
    base, small = choose(m, weights[0], x.device), choose(64, weights[0], x.device)
    found = [base, *(replace(base, split=s) for s in (2, 4)), replace(base, spread=False), replace(base, stages=3)]
    found += [*(replace(base, pdl=p) for p in (0, 1)), small, replace(small, pdl=0), replace(base, whole=0, split=2)]
    times: dict[Launch, list[list[float]]] = {launch: [[], []] for launch in found}
    for _ in range(ROUNDS):
        for launch, (product, gated) in times.items():
            product.append(time_graph([partial(run, x, w, None, both, launch) for w in weights], REPLAYS))
            gated.append(time_graph([partial(run, x, w, None, out, launch, "silu") for w in weights], REPLAYS))
    for launch, rounds in times.items():
        products, gates = (" ".join(f"{value:.1f}" for value in values) for values in rounds)
        form = f"{launch.bm} {launch.bn} split {launch.split} whole {launch.whole} w {launch.warps} s {launch.stages}"
        print(f"{weights[0].n} {m} product {products} gated {gates} | {form} spread {launch.spread} pdl {launch.pdl}")


def main() -> None:
    """Print a line a shape and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="other launches for 48 and 96 rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gated_product.py needs a CUDA device")
    for name, (n, k) in SHAPES.items():
        weights = [random_weight(n, k, 4, 128) for _ in range(8)]
        measure(1024, weights[:3])  # an idle card's clock is low: the first figures would be its
        if options.launches:
            launches(48, weights)
            launches(96, weights)
            continue
        for m in ROWS:
            product, apart, gated = measure(m, weights if m <= 256 else weights[:3])
            print(f"{name} {m:5} product {product:7.1f} apart {apart:7.1f} gated {gated:7.1f}  {gated / apart:.3f}")


if __name__ == "__main__":
    main()

"""What other forms of the decode kernel are predicted to take on a T4, beside the launches of the table. No GPU needed.

    python benchmarks/t4_forms.py              # a layer of Llama-2-7B at M = 1; takes a quarter of an hour
    python benchmarks/t4_forms.py --m 16 --json

Tiles of 64, 128 and 256 outputs, 2 to 8 warps, with and without a block of weights read ahead, weights scaled before or
after the product, sums in halves; each with the split that is best for a layer. Microseconds of the cost model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from qengine.kernels.cost import CARDS, MODELS, CostError
from qengine.kernels.kernel_cost import KernelCost, kernel_time
from qengine.kernels.launch import Launch

CARD = CARDS["T4"]
SPLITS = (1, 2, 3, 4, 5, 6, 8)
FLAGS = (False, True)


def forms(first: Launch) -> Iterator[Launch]:
    """Launches with first's rows."""
    for bn, warps, prefetch, scaled, halves in itertools.product((64, 128, 256), (2, 4, 8), (0, 1), FLAGS, FLAGS):
        yield replace(first, bn=bn, warps=warps, prefetch=prefetch, scaled=scaled, halves=halves, split=1)


def layer(m: int, model: str, form: Launch) -> list[KernelCost]:
    """Each linear of a layer with its best split. Raises CostError for a form that does not compile."""
    found = []
    for shape in MODELS[model].linears:
        costs = (kernel_time(CARD, m, shape.n, shape.k, launch=replace(form, split=split)) for split in SPLITS)
        found.append(min(costs, key=lambda cost: cost.us))
    return found


def main() -> None:
    """Compile, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, default=1, help="rows of x, up to 16")
    parser.add_argument("--model", choices=MODELS, default="Llama-2-7B")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = [kernel_time(CARD, options.m, shape.n, shape.k) for shape in MODELS[options.model].linears]
    assert table[0].launch is not None, "a packed weight has a launch"
    best, tried = list(table), 0
    for form in forms(table[0].launch):
        try:
            found = layer(options.m, options.model, form)
        except CostError as error:
            print(f"{form}: {error}", file=sys.stderr)
            continue
        tried += 1
        best = [min(pair, key=lambda cost: cost.us) for pair in zip(best, found, strict=True)]
        print(f"{sum(cost.us for cost in found):7.1f} us {form}", file=sys.stderr, flush=True)
    before, after = (sum(cost.us for cost in costs) for costs in (table, best))
    if options.json:
        print(json.dumps({"m": options.m, "table_us": before, "best_us": after, "best": [asdict(x) for x in best]}))
    else:
        print(
            f"{options.model}, M = {options.m}: {before:.1f} us by the table, {after:.1f} by the best of {tried} forms"
        )


if __name__ == "__main__":
    main()

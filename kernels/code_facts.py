"""What the machine code of a GEMM launch holds, without a GPU and, for launches that are shipped, without Triton.

`launch_tables/code.json` keeps the counts for every launch that `pick` can give from the shipped tables and rules;
`python benchmarks/t4_model.py --write-code` makes it. A launch that is not in it (one from a user's own table) is
compiled ahead of time where Triton is installed.
"""

from __future__ import annotations

import functools
import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from qengine.kernels.launch import SHARED, Launch

MOST_INSTRUCTIONS = {4: 3.5, 8: 7.0}
"""Lane instructions a weight that a launch for up to 16 rows may take, by bits."""
FILE = Path(__file__).parent / "launch_tables" / "code.json"


class CostError(RuntimeError):
    """A prediction that cannot be made on this machine, and what to do."""


@dataclass(frozen=True)
class CodeFacts:
    """Of one kernel: instructions a warp issues in a turn of the main loop, tensor-core instructions among them.

    registers: a thread. stack: bytes a thread. shared: bytes a program. wide: the products are Hopper's wgmma.
    """

    instructions: int
    tensor: int
    registers: int
    stack: int
    shared: int
    wide: bool


def normal(launch: Launch, bits: int, group: int) -> tuple[Launch, int]:
    """The launch and group that stand for all with the same main loop: one split, groups of a block and more as one."""
    block = 512 // bits
    return replace(launch, split=2, whole=0), group if 0 <= group < block else 128


def key(launch: Launch, sm: int, bits: int, group: int) -> str:
    """The name of a launch's counts in code.json."""
    kept, group = normal(launch, bits, group)
    fields = ",".join(str(int(v)) for v in astuple(kept)[1:])
    return f"sm{sm} w{bits} g{group} {fields}"


def code_facts(launch: Launch, sm: int, bits: int, group: int) -> CodeFacts:
    """The counts of a "gemm" launch for capability `sm`; group 0 is one group.

    Raises CostError where the launch is not shipped and Triton is not installed.
    """
    shipped = load_facts().get(key(launch, sm, bits, group))
    if shipped is not None:
        return shipped
    kept, group = normal(launch, bits, group)
    return compiled_facts(kept, sm, bits, group)


@functools.lru_cache
def load_facts() -> dict[str, CodeFacts]:
    """The shipped counts by key."""
    if not FILE.is_file():
        return {}
    rows = json.loads(FILE.read_text())["code"]
    return {name: CodeFacts(r[0], r[1], r[2], r[3], r[4], bool(r[5])) for name, r in rows.items()}


def shipped_version() -> str:
    """The Triton that made the shipped counts, "" where none are shipped."""
    return str(json.loads(FILE.read_text())["triton"]) if FILE.is_file() else ""


@functools.cache
def compiled_facts(launch: Launch, sm: int, bits: int, group: int) -> CodeFacts:
    """The counts of a launch, compiled now. Raises CostError without Triton."""
    try:
        from qengine.kernels.w4a16.aot import inspect_launch
    except ImportError as error:
        raise CostError(
            f"cost: no figures are shipped for {key(launch, sm, bits, group)} and Triton, which would compile it, "
            f"cannot be imported ({error}); install triton (Linux)"
        ) from error
    code, shared = inspect_launch(launch, sm, bits, group)
    loop = code.main_loop()
    tensor = loop.of("HMMA", "HGMMA")
    return CodeFacts(loop.total, tensor, code.registers, code.stack, shared, loop.of("HGMMA") > 0)


def instructions_a_weight(facts: CodeFacts, launch: Launch, bits: int) -> float:
    """Lane instructions of the main loop for each weight."""
    return facts.instructions * 32 * launch.warps / (launch.bn * (512 // bits))


def over_budget(launch: Launch, facts: CodeFacts, sm: int, bits: int) -> str | None:
    """Why a launch must not be chosen on capability `sm`, or None."""
    if facts.stack and sm < 90:
        return f"{facts.stack} bytes of stack; none is allowed"
    if facts.shared > SHARED[sm]:
        return f"{facts.shared} bytes of shared memory; {SHARED[sm]} are allowed"
    if not facts.tensor:
        return "no tensor-core instruction in the main loop"
    spent = instructions_a_weight(facts, launch, bits)
    if launch.bm <= 16 and spent > MOST_INSTRUCTIONS[bits] + 0.005:
        return f"{spent:.2f} instructions a weight; {MOST_INSTRUCTIONS[bits]} are allowed up to 16 rows"
    return None


def write_facts(found: dict[str, CodeFacts], triton_version: str) -> None:
    """Write code.json, one launch a line."""
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps([int(v) for v in astuple(found[name])])}" for name in sorted(found)
    )
    FILE.write_text(f'{{"triton": {json.dumps(triton_version)},\n "code": {{\n{lines}\n}}}}\n')
    load_facts.cache_clear()

"""Reading machine code: what a compiled kernel holds, without a GPU, by the cuobjdump inside Triton's package."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P(?:\d+|T)\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.M)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Loop:
    """A loop's instructions for one warp: counts by opcode, with modifiers (`HMMA.1688.F32`)."""

    counts: Counter[str]

    @property
    def total(self) -> int:
        """Instructions of one turn."""
        return sum(self.counts.values())

    def of(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with one of the prefixes."""
        return sum(n for op, n in self.counts.items() if op.startswith(prefixes))


@dataclass(frozen=True)
class Code:
    """A kernel's registers a thread, stack bytes a thread, instructions in all, and its loops."""

    registers: int
    stack: int
    total: int
    loops: tuple[Loop, ...]

    def main_loop(self) -> Loop:
        """The innermost loop with the most tensor-core instructions. Raises ValueError where there is no loop."""
        if not self.loops:
            raise ValueError("the kernel has no loop")
        return max(self.loops, key=lambda loop: (loop.of("HMMA", "HGMMA"), -loop.total))


def _cuobjdump(option: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> str:
    """SASS as text."""
    return _cuobjdump("-sass", cubin)


def read(cubin: bytes) -> Code:
    """Registers, stack, instructions and loops of a cubin with one kernel."""
    usage = _USAGE.search(_cuobjdump("-res-usage", cubin))
    if usage is None:
        raise ValueError("cuobjdump printed no resource usage")
    listing = [(int(at, 16), op, rest) for at, op, rest in _INSTRUCTION.findall(disassemble(cubin))]
    loops = []
    for at, op, rest in listing:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        # a branch to itself is the padding after the last instruction
        if target and int(target[1], 16) < at:
            body = [name for where, name, _ in listing if int(target[1], 16) <= where <= at]
            loops.append(Loop(Counter(body)))
    return Code(int(usage[1]), int(usage[2]), len(listing), tuple(loops))

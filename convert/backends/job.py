"""What a peer's quantizer is asked to do. Plain data: it crosses from one process to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class PeerJob:
    """One conversion by another library.

    backend: autoawq, gptqmodel or optimum. source: folder with plain weights and a tokenizer. out: a folder that is
    there and empty. windows: calibration tokens, lists of equal length. method: awq or gptq; format: awq-gemm, gptq or
    gptq_v2. device: cpu, or cuda for the first card that the process sees. The rest is as in ConvertSettings.
    """

    backend: str
    source: str
    out: str
    windows: list[list[int]]
    method: str
    format: str
    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    device: str
    seed: int

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> PeerJob:
        """Read what `save` wrote."""
        return PeerJob(**json.loads(path.read_text(encoding="utf-8")))

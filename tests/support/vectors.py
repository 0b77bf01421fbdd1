"""Checkpoints written by other libraries: compact copies under tests/data/vectors, the originals where they exist.

A folder holds the checkpoint as its library wrote it, `expected.json` (sha256 of the float32 bytes of every dequantized
weight, as that library computes it) and, for most, `logits.safetensors` (`input_ids` [1, 32] and its logits).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "vectors"
ORIGINALS = ROOT.parent / "shared" / "vectors"


def vector_names() -> list[str]:
    """Names of all checkpoints, sorted."""
    return sorted(folder.name for folder in DATA.iterdir() if (folder / "config.json").is_file())


def vector_path(name: str) -> Path:
    """The checkpoint folder."""
    return DATA / name


def vector_logits(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(input_ids int64 [1, 32], logits float32 [1, 32, vocab]) as the writing library computed them; None if it did
    not."""
    path = DATA / name / "logits.safetensors"
    if not path.is_file():
        return None
    tensors = load_file(path)
    return tensors["input_ids"], tensors["logits"].float()


def vector_expected(name: str) -> dict[str, dict[str, Any]]:
    """Weight name -> {"shape", "sha256"} of the float32 bytes."""
    expected: dict[str, dict[str, Any]] = json.loads((DATA / name / "expected.json").read_text())["weights"]
    return expected


def float32_digest(weight: torch.Tensor) -> str:
    """sha256 of the row-major float32 bytes, -0.0 taken for 0.0."""
    return hashlib.sha256((weight.to(torch.float32) + 0.0).contiguous().numpy().tobytes()).hexdigest()


def original_names() -> list[str]:
    """Names of the full checkpoints beside the checkout; empty on a user's clone."""
    if not ORIGINALS.is_dir():
        return []
    return sorted(folder.name for folder in ORIGINALS.iterdir() if (folder / "config.json").is_file())

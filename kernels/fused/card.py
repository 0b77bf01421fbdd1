"""What the fused kernels ask of the card they are launched on."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


def capability(device: torch.device) -> int:
    """Compute capability that Triton compiles for on a CUDA device, as 75, 80, 90."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache
def _capability(index: int) -> int:
    override = triton.knobs.runtime.override_arch
    if override:
        return int("".join(c for c in override if c.isdigit()))
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels are launched so that they may start before the one ahead of them ends (from 9.0 on)."""
    return device.type == "cuda" and capability(device) >= 90


def launch_options(pdl: bool) -> dict[str, Any]:
    """Triton's launch option for dependent_launch; left out where it is off, as the interpreter does not know it."""
    return {"launch_pdl": True} if pdl else {}

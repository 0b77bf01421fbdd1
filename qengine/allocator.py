"""Settings of torch's allocator of GPU memory."""

from __future__ import annotations

import os

import torch


def growing_segments() -> None:
    """Let torch's allocator map memory piece by piece, so that freed pieces of one size can serve another.

    Without it a step that follows one of another shape finds memory in pieces that do not fit. Left alone where the
    user has chosen settings of the allocator.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")

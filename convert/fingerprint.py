"""What the bytes of a conversion depend on, so that only the same one is taken up again."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import torch

from qengine import __version__
from qengine.checkpoint import Checkpoint
from qengine.convert.settings import ConvertSettings


def fingerprint(
    checkpoint: Checkpoint, model: str, settings: ConvertSettings, windows: torch.Tensor | None
) -> dict[str, Any]:
    """Settings, source, calibration tokens, versions and the device's name, as plain data.

    The source's tensors go in by name, dtype, shape and place, not by content, which would take minutes to read.
    """
    headers = hashlib.sha256(repr(sorted(checkpoint.config.items(), key=lambda item: item[0])).encode())
    for name, info in checkpoint.tensors.items():
        headers.update(f"{name}/{info.dtype}/{info.shape}/{info.file.name}/{info.offset}\n".encode())
    device = torch.device(settings.device)
    return {
        **asdict(settings),
        "model": model,
        "source": headers.hexdigest()[:16],
        "calibration": None if windows is None else hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16],
        "qengine": __version__,
        "torch": torch.__version__,
        "device_name": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
    }

"""What figures depend on besides the settings: versions and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from qengine import __version__


def versions() -> dict[str, str | None]:
    """Of qengine, Python and what the figures depend on; None where something is not installed."""
    found: dict[str, str | None] = {"qengine": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"cuda": torch.version.cuda}


def commit() -> str:
    """QENGINE_COMMIT, or the checkout's commit, or "unknown"."""
    if os.environ.get("QENGINE_COMMIT"):
        return os.environ["QENGINE_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"

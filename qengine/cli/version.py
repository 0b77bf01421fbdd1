"""`qengine version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated

import typer

import qengine

PACKAGES = ("torch", "triton", "transformers", "safetensors", "huggingface_hub", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of qengine, Python and the libraries that results depend on; None where one is not installed."""
    found: dict[str, str | None] = {"qengine": qengine.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def version(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the versions of qengine and of what it runs on."""
    found = versions()
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value or 'not installed'}")

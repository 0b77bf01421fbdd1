"""What each peer can be asked for, and the refusals of all else before anything is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qengine.convert.settings import ConvertSettings, resolve_settings
from qengine.errors import ConfigError


@dataclass(frozen=True)
class Backend:
    """A peer. title: as it calls itself. modules: must be importable. formats: method -> the packings it writes; the
    first method is the default."""

    title: str
    modules: tuple[str, ...]
    formats: Mapping[str, tuple[str, ...]]


BACKENDS = {
    "autoawq": Backend("AutoAWQ", ("awq",), {"awq": ("awq-gemm",)}),
    "optimum": Backend("Optimum", ("optimum", "gptqmodel"), {"gptq": ("gptq", "gptq_v2")}),
    "gptqmodel": Backend("GPTQModel", ("gptqmodel",), {"gptq": ("gptq", "gptq_v2"), "awq": ("awq-gemm",)}),
}


def backend_settings(
    name: str, *, resume: bool = False, method: str | None = None, keep: Mapping[str, int] | None = None, **options: Any
) -> ConvertSettings:
    """Checked settings of a conversion by the peer `name`; options as in `resolve_settings`.

    Raises ConfigError for what the peer cannot do, and for a peer that is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(f"--backend={name!r} is not known; allowed are {', '.join(BACKENDS)}")
    peer = BACKENDS[name]
    if resume:
        raise ConfigError(f"--resume: {peer.title} keeps nothing of a run that was broken off; drop --resume")
    if keep:
        raise ConfigError(
            f"--keep: {peer.title} is given one grid for all layers; drop --keep, or convert without --backend"
        )
    method = method or next(iter(peer.formats))
    if method not in peer.formats:
        raise ConfigError(
            f"--method {method}: {peer.title} has no such method, only {', '.join(peer.formats)}; choose one of these, "
            "or convert without --backend"
        )
    asked = options.get("format")
    if asked is not None and asked not in peer.formats[method]:
        raise ConfigError(
            f"--format {asked}: {peer.title} does not write it with --method {method}, only "
            f"{', '.join(peer.formats[method])}; choose one of these, or repack the result with qengine convert"
        )
    if asked is None and method == "awq":
        asked = "awq-gemm"  # whatever the bits, which are checked against it
    settings = resolve_settings(method=method, **{**options, "format": asked})
    _check_peer(name, settings)
    _require(name, peer)
    return settings


def _check_peer(name: str, settings: ConvertSettings) -> None:
    if name == "optimum" and settings.sym != (settings.format == "gptq"):
        kind, own = ("--sym", "gptq") if settings.sym else ("--asym", "gptq_v2")
        raise ConfigError(
            f"--format {settings.format} {kind}: Optimum saves what is symmetric as gptq and all else as gptq_v2; use "
            f"--format {own}"
        )
    if name == "autoawq" and settings.sym:
        raise ConfigError("--sym: AutoAWQ cannot pack gemm without zero points of its own; drop --sym")
    if name == "autoawq" and settings.group_size == -1:
        raise ConfigError("--group-size=-1: readers of AutoAWQ's files do not agree on it; give 32, 64 or 128")


def _require(name: str, peer: Backend) -> None:
    missing = [module for module in peer.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--backend {name}: {' and '.join(missing)} cannot be imported; pip install 'qengine[{name}]'"
        )

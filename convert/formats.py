"""Quantized layers as the tensors and the config of each format that readers know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.convert.settings import ConvertSettings
from qengine.kernels.awq.packing import pack_gemm
from qengine.kernels.gptq.packing import pack_gptq
from qengine.quant.compressed_tensors import pack_quantized
from qengine.quant.weights import QuantizedWeight

# compressed-tensors packs 3-bit codes without padding from 0.18.0 on; that is how they are written here.
COMPRESSED_TENSORS_VERSION = "0.19.0"


@dataclass(frozen=True)
class Plan:
    """Which modules are quantized, and in groups of how many columns.

    groups: full module name -> group size (-1: the whole row). group_size: what the config's one field says. plain:
    full name -> why it stays unquantized. bits and sym: of modules that have others than the settings.
    """

    groups: dict[str, int]
    group_size: int
    plain: dict[str, str]
    bits: dict[str, int] = field(default_factory=dict)
    sym: dict[str, bool] = field(default_factory=dict)

    def grid(self, name: str, settings: ConvertSettings) -> tuple[int, int, bool]:
        """(bits, group size, symmetric) of one module."""
        return self.bits.get(name, settings.bits), self.groups[name], self.sym.get(name, settings.sym)

    def head(self) -> str | None:
        """The output head's name, if it is quantized."""
        return next((name for name in self.groups if name.endswith("lm_head")), None)


def why_not_packed(format: str, bits: int, shape: tuple[int, int]) -> str | None:
    """Why a matrix of shape (N, K) cannot be written in `format`, or None."""
    rows, columns = shape
    if format == "awq-gemm" and (rows % 32 or columns % 8):
        return f"awq-gemm needs out_features % 32 == 0 and in_features % 8 == 0, got {rows} x {columns}"
    if format in ("gptq", "gptq_v2") and (rows * bits % 32 or columns * bits % 32):
        return (
            f"{format} needs out_features and in_features times {bits} bits to fill words of 32, got {rows} x {columns}"
        )
    return None


def one_group_only(format: str) -> bool:
    """Whether the format's config has a single group size for all modules."""
    return format == "awq-gemm"


def pack(weight: QuantizedWeight, settings: ConvertSettings, sym: bool) -> dict[str, torch.Tensor]:
    """Tensors of one module by their suffix ("qweight", "scales", ...), the bias not among them. sym: no zero points
    are written where the format can do without."""
    q, zeros, scales, bits = weight.q, weight.zeros, weight.scales, weight.spec.bits
    if settings.format == "awq-gemm":
        return pack_gemm(q, zeros, scales, bits)
    if settings.format == "compressed-tensors":
        return pack_quantized(q, zeros, scales, bits, symmetric=sym)
    g_idx = weight.group_index().to(torch.int32)
    return pack_gptq(q, zeros, scales, bits, g_idx=g_idx, v2=settings.format == "gptq_v2")


def quantization_config(
    settings: ConvertSettings, plan: Plan, version: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The quantization_config object. extra: facts for GPTQ's meta field, such as damp_percent."""
    if settings.format == "awq-gemm":
        return _awq_config(settings, plan)
    if settings.format == "compressed-tensors":
        return _compressed_config(settings, plan)
    return _gptq_config(settings, plan, version, extra)


def _left_out(plan: Plan) -> list[str]:
    return [*([] if plan.head() else ["lm_head"]), *plan.plain]


def _awq_config(settings: ConvertSettings, plan: Plan) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": settings.bits,
        "group_size": plan.group_size,
        "zero_point": not settings.sym,
        "modules_to_not_convert": _left_out(plan),
    }


def _gptq_config(settings: ConvertSettings, plan: Plan, version: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in plan.plain}
    for name in plan.groups:
        bits, group, _ = plan.grid(name, settings)
        if (bits, group) != (settings.bits, plan.group_size):
            dynamic[f"+:^{re.escape(name)}$"] = {"bits": bits, "group_size": group}
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": settings.bits,
        "group_size": plan.group_size,
        "desc_act": settings.desc_act,
        "sym": settings.sym,
        "lm_head": plan.head() is not None,
        "true_sequential": True,
        "static_groups": False,
        "format": settings.format,
        "checkpoint_format": settings.format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"qengine:{version}"], **extra},
    }
    if dynamic:
        config["dynamic"] = dynamic
    return config


def _compressed_config(settings: ConvertSettings, plan: Plan) -> dict[str, Any]:
    by_grid: dict[tuple[int, int, bool], list[str]] = {}
    for name in plan.groups:
        by_grid.setdefault(plan.grid(name, settings), []).append(name)
    groups: dict[str, Any] = {}
    for number, (grid, names) in enumerate(sorted(by_grid.items(), key=lambda item: -len(item[1]))):
        targets = ["Linear"] if len(by_grid) == 1 else [f"re:^{re.escape(name)}$" for name in names]
        groups[f"group_{number}"] = _compressed_group(targets, *grid)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _left_out(plan),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": COMPRESSED_TENSORS_VERSION,
    }


def _compressed_group(targets: list[str], bits: int, group: int, sym: bool) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": sym,
            "strategy": "channel" if group == -1 else "group",
            "group_size": None if group == -1 else group,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        },
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }

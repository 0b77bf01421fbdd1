"""Quantized layers as the tensors and the config of each format that readers know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
    full name -> why it stays unquantized.
    """

    groups: dict[str, int]
    group_size: int
    plain: dict[str, str]


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


def pack(weight: QuantizedWeight, settings: ConvertSettings) -> dict[str, torch.Tensor]:
    """Tensors of one module by their suffix ("qweight", "scales", ...), the bias not among them."""
    q, zeros, scales, bits = weight.q.cpu(), weight.zeros.cpu(), weight.scales.cpu(), weight.spec.bits
    if settings.format == "awq-gemm":
        return pack_gemm(q, zeros, scales, bits)
    if settings.format == "compressed-tensors":
        return pack_quantized(q, zeros, scales, bits, symmetric=settings.sym)
    g_idx = weight.group_index().to(torch.int32).cpu()
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


def _awq_config(settings: ConvertSettings, plan: Plan) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": settings.bits,
        "group_size": plan.group_size,
        "zero_point": not settings.sym,
        "modules_to_not_convert": ["lm_head", *plan.plain],
    }


def _gptq_config(settings: ConvertSettings, plan: Plan, version: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in plan.plain}
    for name, group in plan.groups.items():
        if group != plan.group_size:
            dynamic[f"+:^{re.escape(name)}$"] = {"bits": settings.bits, "group_size": group}
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": settings.bits,
        "group_size": plan.group_size,
        "desc_act": settings.desc_act,
        "sym": settings.sym,
        "lm_head": False,
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
    by_group: dict[int, list[str]] = {}
    for name, group in plan.groups.items():
        by_group.setdefault(group, []).append(name)
    groups: dict[str, Any] = {}
    for number, (group, names) in enumerate(sorted(by_group.items(), key=lambda item: -len(item[1]))):
        targets = ["Linear"] if len(by_group) == 1 else [f"re:^{re.escape(name)}$" for name in names]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": {
                "num_bits": settings.bits,
                "type": "int",
                "symmetric": settings.sym,
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
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *plan.plain],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": COMPRESSED_TENSORS_VERSION,
    }

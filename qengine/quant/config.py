"""The quantization config of a checkpoint: found wherever a library put it, its aliases resolved.

It is a hint: readers decide by the tensors and use the config for what tensors cannot tell.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from qengine.checkpoint import Checkpoint
from qengine.errors import CheckpointError

logger = logging.getLogger(__name__)

SIDE_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")


@dataclass(frozen=True)
class QuantConfig:
    """method: awq, gptq, compressed-tensors, auto-round, or a name this engine does not know. format: lower case, "" if
    absent. bits: None if absent. group_size: -1 for one group. sym: None if absent. origin: the file it was found in.
    raw: the merged object. side: what a side file says, if there is one. writer: the library that wrote it, if
    recorded.
    """

    method: str
    format: str
    bits: int | None
    group_size: int
    sym: bool | None
    origin: str
    writer: str
    raw: dict[str, Any] = field(default_factory=dict)
    side: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the object, config.json's before the side file's."""
        return self.raw.get(key, default)


def read_quant_config(checkpoint: Checkpoint) -> QuantConfig | None:
    """None if the checkpoint names no quantization. CheckpointError if what it says makes no sense."""
    main, origin = _from_config(checkpoint.config)
    side, side_name = _from_side_files(checkpoint)
    if main is None and side is None:
        return None
    raw = dict(main if main is not None else side or {})
    if main is not None and side is not None:
        _warn_disagreement(main, side, side_name)
        raw = {**side, **main}
    return parse_quant_config(raw, origin if main is not None else side_name, side or {})


def _from_config(config: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    places = [(config, "config.json"), (text, "config.json text_config")]
    for key in ("quantization_config", "compression_config"):
        for holder, origin in places:
            value = (holder or {}).get(key)
            if value is None or value == {}:
                continue
            if not isinstance(value, dict):
                raise CheckpointError(f"{origin}: {key} is a {type(value).__name__}, expected an object")
            nested = value.get("quantization_config")
            if isinstance(nested, dict) and not value.get("config_groups"):
                value = {**value, **nested}
            if key == "compression_config" and "quant_method" not in value:
                value = {**value, "quant_method": "compressed-tensors"}
            return value, origin
    return None, ""


def _from_side_files(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, str]:
    for name in SIDE_FILES:
        value = checkpoint.read_json(name)
        if value:
            inner = value.get("quantization_config")
            return (inner if isinstance(inner, dict) else value), name
    return None, ""


def _first(raw: dict[str, Any], *keys: str) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def parse_quant_config(raw: dict[str, Any], origin: str, side: dict[str, Any] | None = None) -> QuantConfig:
    """Resolve aliases (w_bit, q_group_size, version, zero_point, ...) of a quantization config object."""
    method = _method(raw, origin)
    layout = _first(raw, "checkpoint_format", "format") if method != "awq" else None
    if method == "awq":
        layout = _first(raw, "version", "format", "checkpoint_format")
    if method in ("compressed-tensors", "auto-round"):
        layout = _first(raw, "packing_format" if method == "auto-round" else "format")
    sym = raw.get("sym")
    zero_point = raw.get("zero_point")
    if not isinstance(sym, bool):
        sym = (not zero_point) if isinstance(zero_point, bool) else None
    return QuantConfig(
        method=method,
        format=str(layout or "").lower(),
        bits=_integer(raw, origin, 2, 8, "bits", "w_bit", "wbits"),
        group_size=_group_size(raw, origin),
        sym=sym,
        origin=origin,
        writer=_writer(raw),
        raw=raw,
        side=side or {},
    )


def _method(raw: dict[str, Any], origin: str) -> str:
    method = _first(raw, "quant_method", "method", "quant_algo")
    if method is None:
        if "config_groups" in raw:
            return "compressed-tensors"
        if raw.get("load_in_4bit") or raw.get("load_in_8bit"):
            return "bitsandbytes"
        if {"w_bit", "q_group_size"} & set(raw) or str(raw.get("version", "")).lower().startswith(("gem", "llm-awq")):
            return "awq"
        return "gptq"
    if not isinstance(method, str):
        raise CheckpointError(f"{origin}: quant_method is {method!r}, expected a name such as 'awq' or 'gptq'")
    name = method.lower().replace("_", "-")
    aliases = {"intel/auto-round": "auto-round", "autoround": "auto-round", "compressed-tensor": "compressed-tensors"}
    return aliases.get(name, name)


def _integer(raw: dict[str, Any], origin: str, low: int, high: int, *keys: str) -> int | None:
    value = _first(raw, *keys)
    if value is None:
        return None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise CheckpointError(f"{origin}: {keys[0]} is {value!r}, expected an integer from {low} to {high}")
    return int(value)


def _group_size(raw: dict[str, Any], origin: str) -> int:
    value = _first(raw, "group_size", "q_group_size", "groupsize")
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value not in (-1, 0)):
        raise CheckpointError(f"{origin}: group_size is {value!r}, expected -1 (one group) or a positive integer")
    return value if value > 0 else -1


def _writer(raw: dict[str, Any]) -> str:
    meta = raw.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    names = [str(q) for q in quantizer] if isinstance(quantizer, list) else [str(quantizer)] if quantizer else []
    if raw.get("provider"):
        names.append(str(raw["provider"]))
    if raw.get("autoround_version"):
        names.append(f"auto-round:{raw['autoround_version']}")
    if raw.get("quant_method") == "compressed-tensors" and raw.get("version"):
        names.append(f"compressed-tensors:{raw['version']}")
    return ", ".join(dict.fromkeys(names))


def _warn_disagreement(main: dict[str, Any], side: dict[str, Any], side_name: str) -> None:
    for keys in (
        ("bits", "w_bit"),
        ("group_size", "q_group_size"),
        ("checkpoint_format", "format", "version"),
        ("sym",),
    ):
        ours, theirs = _first(main, *keys), _first(side, *keys)
        if ours is not None and theirs is not None and str(ours).lower() != str(theirs).lower():
            logger.warning("config.json says %s=%s, %s says %s; the tensors decide", keys[0], ours, side_name, theirs)

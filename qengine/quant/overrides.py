"""Per-module settings inside a quantization config: GPTQModel's `dynamic` and AutoRound's `extra_config`.

Hints only: whether a module is quantized, and how wide its codes are, its tensors say.
"""

from __future__ import annotations

import re
from typing import Any

from qengine.errors import CheckpointError
from qengine.quant.config import QuantConfig


def module_setting(config: QuantConfig, name: str, key: str, default: Any) -> Any:
    """Setting `key` (bits, group_size, sym) of module `name`: the first override that matches, else `default`."""
    for rules, find in ((config.get("dynamic"), _dynamic), (config.get("extra_config"), _extra)):
        if isinstance(rules, dict):
            override = find(rules, name, config.origin)
            if override is not None and override.get(key) is not None:
                return override[key]
    return default


def _matches(pattern: str, name: str, origin: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(
            f"{origin}: {pattern!r} is not a valid regular expression ({error}); correct it"
        ) from error


def _dynamic(rules: dict[str, Any], name: str, origin: str) -> dict[str, Any] | None:
    """First match wins; re.match on the full dotted name; "-:" says not quantized, "+:" or nothing overrides."""
    for pattern, override in rules.items():
        skip = pattern.startswith("-:")
        if _matches(pattern[2:] if skip or pattern.startswith("+:") else pattern, name, origin):
            return {} if skip or not isinstance(override, dict) else override
    return None


def _extra(rules: dict[str, Any], name: str, origin: str) -> dict[str, Any] | None:
    """The exact name, else the first key that matches as a regular expression."""
    if isinstance(rules.get(name), dict):
        return dict(rules[name])
    for pattern, override in rules.items():
        special = any(sign in pattern for sign in "*+?[]()|^$\\")
        if special and isinstance(override, dict) and _matches(pattern, name, origin):
            return override
    return None


def matches_target(target: str, name: str, origin: str) -> bool:
    """compressed-tensors' targets and ignores: a class name is none of our business, `re:` a regex, else the name."""
    if target.startswith("re:"):
        return _matches(target[3:], name, origin)
    return target == name

"""Reads rotary embeddings from configs old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

from typing import Any

from qengine.errors import CheckpointError, UnsupportedError
from qengine.layers.rope import RopeSpec
from qengine.layers.rope_frequencies import ROPE_KINDS
from qengine.models.config_reader import ConfigReader

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")

_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "factor")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rope(
    config: ConfigReader,
    head_dim: int,
    *,
    layer_type: str = "full_attention",
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    aliases: dict[str, str] | None = None,
    original: int | None = None,
) -> RopeSpec:
    """The rotary embedding of layers of `layer_type`.

    theta: where the config has none. partial: the share of head_dim that rotates where the config does not say, None
    for families that always rotate whole heads. aliases: other names of kinds. original: the length of the original
    context where the config has none; without it, max_position_embeddings.
    Raises UnsupportedError for an unknown kind, CheckpointError for missing or wrong values.
    """
    values = _parameters(config, layer_type)
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str):
        raise config.wrong("rope_type", kind, "a string")
    kind = (aliases or {}).get(kind, kind)
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise UnsupportedError(f"{config.where}: rope_type {kind!r} is not supported; known are {known}")
    rotary_dim = _rotary_dim(config, values, head_dim, partial)
    reader = ConfigReader(values, f"{config.where}: rope parameters")
    base = reader.number("rope_theta", config.values.get("rope_theta") or theta)
    if kind == "default":
        return RopeSpec(kind, base, rotary_dim, interleaved)
    longest = config.integer("max_position_embeddings")
    # A value beside the rope parameters goes before one among them, as in transformers (Phi-3 keeps it there).
    original = config.optional_integer("original_max_position_embeddings") or reader.optional_integer(
        "original_max_position_embeddings", original
    )
    params: dict[str, Any] = {"max_position_embeddings": longest}
    params["original_max_position_embeddings"] = original or longest
    params |= {key: values[key] for key in _OPTIONAL if values.get(key) is not None}
    if kind == "yarn" and "factor" not in params:
        params["factor"] = longest / params["original_max_position_embeddings"]
    for key in (*_REQUIRED[kind], *params):
        params[key] = params[key] if key in params and key not in values else _checked(reader, key, rotary_dim)
    _check_consistent(reader, kind, params)
    return RopeSpec(kind, base, rotary_dim, interleaved, params)


def _parameters(config: ConfigReader, layer_type: str) -> dict[str, Any]:
    """The config's rope values for a layer type; {} where it has none. `rope_scaling` goes before `rope_parameters`."""
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters") or {}
    if not any(key in LAYER_TYPES for key in values):
        return values
    nested = values.get(layer_type) or {}
    if not isinstance(nested, dict):
        raise config.wrong(f"rope_parameters.{layer_type}", nested, "an object")
    return nested


def _rotary_dim(config: ConfigReader, values: dict[str, Any], head_dim: int, partial: float | None) -> int:
    key = "partial_rotary_factor"
    share = ConfigReader({**config.values, **{k: v for k, v in values.items() if k == key}}, config.where).number(
        key, 1.0 if partial is None else partial
    )
    if partial is None and share != 1.0:
        raise UnsupportedError(f"{config.where}: {key} is {share}, but this architecture rotates whole heads")
    size = int(head_dim * share)
    if share > 1 or size < 2 or size % 2:
        raise UnsupportedError(
            f"{config.where}: {key}={share} of head_dim={head_dim} gives {size} rotating dimensions; "
            f"an even number from 2 to head_dim is supported"
        )
    return size


def _checked(reader: ConfigReader, key: str, rotary_dim: int) -> Any:
    if key in ("short_factor", "long_factor"):
        value = reader.values.get(key)
        numbers = isinstance(value, list) and all(isinstance(x, int | float) and x > 0 for x in value)
        if not numbers or len(value or ()) != rotary_dim // 2:
            got = f"{len(value)} values" if isinstance(value, list) else value
            raise reader.wrong(key, got, f"{rotary_dim // 2} numbers above 0, one for each rotating pair")
        return [float(x) for x in value or ()]
    if key == "truncate":
        return reader.flag(key)
    if key.endswith("position_embeddings"):
        return reader.integer(key)
    return reader.number(key)


def _check_consistent(reader: ConfigReader, kind: str, params: dict[str, Any]) -> None:
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        low, high = params["low_freq_factor"], params["high_freq_factor"]
        raise CheckpointError(f"{reader.where}: high_freq_factor={high} must be greater than low_freq_factor={low}")

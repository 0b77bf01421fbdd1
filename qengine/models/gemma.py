"""Gemma 2 and the text part of Gemma 3."""

from __future__ import annotations

from typing import Any

from qengine.errors import UnsupportedError
from qengine.models.common import QKV, common_spec, layer_types
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import LayerSpec, ModelSpec, NormNames

_NORMS = NormNames(
    attention_in="input_layernorm",
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


def gemma2(config: ConfigReader) -> ModelSpec:
    """Gemma2ForCausalLM: every other layer slides; soft caps on attention scores and logits."""
    config = config.with_defaults(
        head_dim=256, sliding_window=4096, query_pre_attn_scalar=256, tie_word_embeddings=True
    )
    types = layer_types(config) or _alternate(config, 2)
    rope = read_rope(config, config.integer("head_dim"))
    window = config.optional_integer("sliding_window")
    layers = tuple(LayerSpec(rope, window if kind == "sliding_attention" else None) for kind in types)
    caps = {
        "attn_softcap": config.optional_number("attn_logit_softcapping", 50.0),
        "logit_softcap": config.optional_number("final_logit_softcapping", 30.0),
    }
    return _spec(config, layers, caps)


def gemma3(config: ConfigReader) -> ModelSpec:
    """Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration, whose config leaves out most keys.

    Sliding layers have a rotary embedding of their own; `rope_scaling` is for the full layers alone.
    """
    config = config.with_defaults(
        vocab_size=262208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    types = layer_types(config) or _alternate(config, config.integer("sliding_window_pattern", 6))
    size, window = config.integer("head_dim"), config.optional_integer("sliding_window")
    full = read_rope(config, size, theta=1_000_000.0)
    local = read_rope(_local(config), size, layer_type="sliding_attention")
    layers = tuple(LayerSpec(local, window) if kind == "sliding_attention" else LayerSpec(full) for kind in types)
    caps = {
        "attn_softcap": config.optional_number("attn_logit_softcapping"),
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }
    return _spec(config, layers, caps, qk_norm="head")


def _spec(config: ConfigReader, layers: tuple[LayerSpec, ...], caps: dict[str, Any], **fields: Any) -> ModelSpec:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedError(f"{config.where}: use_bidirectional_attention is set; only causal models are supported")
    return common_spec(
        config,
        layers,
        norm_placement="sandwich",
        norms=_NORMS,
        norm_offset=1.0,
        activation=config.string("hidden_activation", "gelu_pytorch_tanh"),
        embed_scale=config.integer("hidden_size") ** 0.5,
        attn_scale=config.number("query_pre_attn_scalar") ** -0.5,
        biases=(*QKV, "self_attn.o_proj") if config.flag("attention_bias", False) else (),
        residual_float32=True,
        **caps,
        **fields,
    )


def _alternate(config: ConfigReader, period: int) -> list[str]:
    """Every `period`-th layer is full, the others slide."""
    count = config.integer("num_hidden_layers")
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]


def _local(config: ConfigReader) -> ConfigReader:
    """The config as the sliding layers' rope sees it: in the old style only rope_local_base_freq is theirs."""
    parameters = config.mapping("rope_parameters") or {}
    nested = parameters.get("sliding_attention")
    values = {key: value for key, value in config.values.items() if not key.startswith("rope_")}
    values["rope_theta"] = config.number("rope_local_base_freq", 10000.0)
    if isinstance(nested, dict):
        values["rope_parameters"] = nested
    return ConfigReader(values, config.where, {"max_position_embeddings": config.integer("max_position_embeddings")})

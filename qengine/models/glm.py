"""GLM-4: the 9B releases of 2024 (Glm) and of 2025 (Glm4)."""

from __future__ import annotations

from typing import Any

from qengine.models.common import QKV, common_spec, uniform_layers
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import ModelSpec, NormNames


def glm(config: ConfigReader) -> ModelSpec:
    """GlmForCausalLM: half of each head rotates, in neighbouring pairs; gate and up in one matrix."""
    return _spec(config)


def glm4(config: ConfigReader) -> ModelSpec:
    """Glm4ForCausalLM: Glm with a norm after each sublayer too."""
    norms = NormNames(
        attention_in="input_layernorm",
        attention_out="post_self_attn_layernorm",
        mlp_in="post_attention_layernorm",
        mlp_out="post_mlp_layernorm",
    )
    return _spec(config, norm_placement="sandwich", norms=norms)


def _spec(config: ConfigReader, **fields: Any) -> ModelSpec:
    config = config.with_defaults(head_dim=128, rms_norm_eps=1.5625e-7)
    rope = read_rope(config, config.integer("head_dim"), partial=0.5, interleaved=True)
    biases = QKV if config.flag("attention_bias", True) else ()
    return common_spec(config, uniform_layers(config, rope), fused_gate_up=True, biases=biases, **fields)

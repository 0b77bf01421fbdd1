"""Llama 1 to 3.3 (also SmolLM 2) and Mistral: the plain pre-norm decoder."""

from __future__ import annotations

from qengine.models.common import MLP, QKV, common_spec, head_dim, uniform_layers
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import ModelSpec


def llama(config: ConfigReader) -> ModelSpec:
    """LlamaForCausalLM."""
    biases: tuple[str, ...] = (*QKV, "self_attn.o_proj") if config.flag("attention_bias", False) else ()
    if config.flag("mlp_bias", False):
        biases += MLP
    return common_spec(config, uniform_layers(config, read_rope(config, head_dim(config))), biases=biases)


def mistral(config: ConfigReader) -> ModelSpec:
    """MistralForCausalLM: all layers share a sliding window, 4096 where the config does not mention it."""
    window = config.optional_integer("sliding_window", 4096)
    return common_spec(config, uniform_layers(config, read_rope(config, head_dim(config)), window))

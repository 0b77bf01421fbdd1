"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from qengine.models.common import QKV, common_spec, head_dim, layer_types
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import LayerSpec, ModelSpec


def qwen2(config: ConfigReader) -> ModelSpec:
    """Qwen2ForCausalLM: biases on q, k and v."""
    return common_spec(config, _layers(config), biases=QKV)


def qwen3(config: ConfigReader) -> ModelSpec:
    """Qwen3ForCausalLM: q and k are normalized head by head; head_dim is the config's own."""
    config = config.with_defaults(head_dim=128)
    biases = (*QKV, "self_attn.o_proj") if config.flag("attention_bias", False) else ()
    return common_spec(config, _layers(config), qk_norm="head", biases=biases)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """With use_sliding_window, the layers of that type have the window, else those from max_window_layers on."""
    count = config.integer("num_hidden_layers")
    rope = read_rope(config, head_dim(config))
    types = layer_types(config)
    window = None
    if config.flag("use_sliding_window", False):
        window = config.optional_integer("sliding_window", 4096)
    first = config.integer("max_window_layers", 28, least=0)
    sliding = [kind == "sliding_attention" for kind in types] if types else [i >= first for i in range(count)]
    return tuple(LayerSpec(rope, window if slides else None) for slides in sliding)

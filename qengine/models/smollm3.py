"""SmolLM 3."""

from __future__ import annotations

from qengine.models.common import MLP, QKV, common_spec, head_dim, layer_types
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import LayerSpec, ModelSpec


def smollm3(config: ConfigReader) -> ModelSpec:
    """SmolLM3ForCausalLM: a Llama whose every fourth layer has no position embedding (1 in no_rope_layers: it has)."""
    config = config.with_defaults(tie_word_embeddings=True)
    count = config.integer("num_hidden_layers")
    rope = read_rope(config, head_dim(config), theta=2_000_000.0)
    rotates = config.list_of("no_rope_layers", int, count)
    if rotates is None:
        interval = config.integer("no_rope_layer_interval", 4)
        rotates = [int((i + 1) % interval != 0) for i in range(count)]
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    types = layer_types(config)
    sliding = [kind == "sliding_attention" for kind in types] if types else [not value for value in rotates]
    layers = tuple(
        LayerSpec(rope if turns else None, window if slides else None)
        for turns, slides in zip(rotates, sliding, strict=True)
    )
    biases: tuple[str, ...] = (*QKV, "self_attn.o_proj") if config.flag("attention_bias", False) else ()
    if config.flag("mlp_bias", False):
        biases += MLP
    return common_spec(config, layers, biases=biases)

"""What most families' configs have in common."""

from __future__ import annotations

from typing import Any

from qengine.errors import CheckpointError
from qengine.layers.activation import gated_activation
from qengine.layers.rope import RopeSpec
from qengine.models.config_reader import ConfigReader
from qengine.models.spec import LayerSpec, ModelSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def head_dim(config: ConfigReader) -> int:
    """Dimensions a head: `head_dim`, else hidden_size / num_attention_heads."""
    size = config.optional_integer("head_dim")
    if size is not None:
        return size
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise CheckpointError(
            f"{config.where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}; give head_dim"
        )
    return hidden // heads


def uniform_layers(config: ConfigReader, rope: RopeSpec, sliding_window: int | None = None) -> tuple[LayerSpec, ...]:
    """All layers alike."""
    return (LayerSpec(rope, sliding_window),) * config.integer("num_hidden_layers")


def layer_types(config: ConfigReader) -> list[str] | None:
    """The config's `layer_types`, checked: each full_attention or sliding_attention. None where it has none."""
    types = config.list_of("layer_types", str, config.integer("num_hidden_layers"))
    for kind in types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise config.wrong("layer_types", kind, "full_attention or sliding_attention")
    return types


def common_spec(config: ConfigReader, layers: tuple[LayerSpec, ...], **fields: Any) -> ModelSpec:
    """A ModelSpec from the usual keys; `fields` add to them and override them."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    size = head_dim(config)
    values: dict[str, Any] = {
        "architecture": config.values["architectures"][0],
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "max_position": config.integer("max_position_embeddings"),
        "layers": layers,
        "attn_scale": size**-0.5,
        "tied_head": config.flag("tie_word_embeddings", False),
    }
    if "norm_eps" not in fields:
        values["norm_eps"] = config.number("rms_norm_eps")
    if "activation" not in fields:
        values["activation"] = config.string("hidden_act")
    spec = ModelSpec(**{**values, **fields})
    gated_activation(spec.activation)
    return spec

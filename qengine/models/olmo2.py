"""OLMo 2."""

from __future__ import annotations

from qengine.models.common import QKV, common_spec, head_dim, uniform_layers
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import ModelSpec, NormNames


def olmo2(config: ConfigReader) -> ModelSpec:
    """Olmo2ForCausalLM: norms on the sublayers' outputs only, and on all of q and all of k."""
    return common_spec(
        config,
        uniform_layers(config, read_rope(config, head_dim(config))),
        norm_placement="post",
        norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="full",
        biases=(*QKV, "self_attn.o_proj") if config.flag("attention_bias", False) else (),
    )

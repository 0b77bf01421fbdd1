"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from qengine.models.common import common_spec, head_dim, uniform_layers
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import ModelSpec

# The names that longrope had in the models' first releases.
_ALIASES = {"su": "longrope", "yarn": "longrope"}


def phi3(config: ConfigReader) -> ModelSpec:
    """Phi3ForCausalLM: q, k and v in one matrix, gate and up in another; longrope, partial rotary in Phi-4-mini."""
    rope = read_rope(config, head_dim(config), partial=1.0, aliases=_ALIASES, original=4096)
    layers = uniform_layers(config, rope, config.optional_integer("sliding_window"))
    return common_spec(config, layers, fused_qkv=True, fused_gate_up=True)

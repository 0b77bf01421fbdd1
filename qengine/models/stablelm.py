"""StableLM 2 and StableLM 3B."""

from __future__ import annotations

from qengine.models.common import QKV, common_spec, head_dim, uniform_layers
from qengine.models.config_reader import ConfigReader
from qengine.models.rope_config import read_rope
from qengine.models.spec import ModelSpec, NormNames


def stablelm(config: ConfigReader) -> ModelSpec:
    """StableLmForCausalLM: LayerNorm, a quarter of each head rotates; 12B norms each head and adds in parallel."""
    parallel = config.flag("use_parallel_residual", False)
    return common_spec(
        config,
        uniform_layers(config, read_rope(config, head_dim(config), partial=0.25)),
        norm_kind="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norms=NormNames(mlp_in=None) if parallel else NormNames(),
        parallel_residual=parallel,
        qk_norm="per_head" if config.flag("qk_layernorm", False) else "none",
        biases=QKV if config.flag("use_qkv_bias", False) else (),
    )

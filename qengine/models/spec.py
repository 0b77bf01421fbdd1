"""What distinguishes one decoder-only family from another, as plain data.

A file in this folder turns a Hugging Face config into a ModelSpec; `decoder.py` runs any ModelSpec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    kind: default, linear, dynamic, yarn, longrope or llama3 (transformers' `rope_type`). theta: the base.
    rotary_dim: leading dimensions of a head that rotate (partial rotary). interleaved: pairs are (0,1), (2,3), ...
    (GLM) instead of (i, i + rotary_dim/2). params: the remaining fields of transformers' `rope_parameters`.
    """

    kind: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer. rope None: no position embedding. sliding_window: tokens seen, self included."""

    rope: RopeSpec | None
    sliding_window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    norm_placement: "pre" (norm before each sublayer), "post" (norm on each sublayer's output, OLMo 2) or "sandwich"
    (both, Gemma 2/3 and GLM-4). norm_offset: added to the norm's weight (Gemma: 1). qk_norm: "head" (over head_dim,
    one weight), "full" (over all heads, OLMo 2), "per_head" (LayerNorm, a weight for every head, StableLM).
    attn_scale multiplies q.k. *_softcap: cap * tanh(x / cap). embed_scale multiplies embeddings.
    fused_qkv and fused_gate_up: the checkpoint stores qkv_proj and gate_up_proj (Phi-3, GLM-4's MLP).
    residual_float32: the residual stream overflows fp16 and is kept in float32 (Gemma).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    attn_scale: float
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    parallel_residual: bool = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    activation: str = "silu"
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tied_head: bool = False
    residual_float32: bool = False
    prefix: str = "model."
    head_name: str = "lm_head"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

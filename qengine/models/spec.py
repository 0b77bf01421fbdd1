"""What distinguishes one decoder-only family from another, as plain data.

A file in this folder turns a Hugging Face config into a ModelSpec; `decoder.py` runs any ModelSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qengine.layers.rope import RopeSpec

__all__ = ["LayerSpec", "ModelSpec", "NormNames", "RopeSpec"]


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer. rope None: no positions. sliding_window: tokens seen, self included."""

    rope: RopeSpec | None
    sliding_window: int | None = None


@dataclass(frozen=True)
class NormNames:
    """The checkpoint's names of a layer's norms, by their place; None where there is none.

    attention_in, mlp_in: on the input of the sublayer. attention_out, mlp_out: on its output, before it is added.
    """

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    norm_placement: "pre" (norm before each sublayer), "post" (norm on each sublayer's output, OLMo 2) or "sandwich"
    (both, Gemma 2/3 and GLM-4); `norms` has their names. norm_offset: added to the norm's weight (Gemma: 1).
    qk_norm: "head" (over head_dim, one weight), "full" (over all heads, OLMo 2), "per_head" (LayerNorm, a weight for
    every head, StableLM). parallel_residual: attention and MLP read the same norm and are added together.
    attn_scale multiplies q.k. *_softcap: cap * tanh(x / cap). embed_scale multiplies embeddings.
    fused_qkv and fused_gate_up: the checkpoint stores qkv_proj and gate_up_proj (Phi-3, GLM-4's MLP).
    biases: linears, relative to the layer, that must have one; others have one if the checkpoint does.
    residual_float32: the residual stream overflows fp16 and is kept in float32 (Gemma).
    prefix, head_name: where the checkpoint's names start, and the name of the output layer.
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
    norms: NormNames = NormNames()
    parallel_residual: bool = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    activation: str = "silu"
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    biases: tuple[str, ...] = ()
    tied_head: bool = False
    residual_float32: bool = False
    prefix: str = "model."
    head_name: str = "lm_head"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def rope_switch_length(self) -> int | None:
        """Length over which longrope changes all angles, so that caches must be computed anew; None without it."""
        lengths = [layer.rope.switch_length for layer in self.layers if layer.rope and layer.rope.switch_length]
        return min(lengths) if lengths else None

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each linear of a layer, under the checkpoint's names relative to the layer, in order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.fused_qkv:
            shapes = {"self_attn.qkv_proj": (q + 2 * kv, hidden)}
        else:
            shapes = {
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
            }
        shapes["self_attn.o_proj"] = (hidden, q)
        if self.fused_gate_up:
            shapes["mlp.gate_up_proj"] = (2 * inner, hidden)
        else:
            shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
        shapes["mlp.down_proj"] = (hidden, inner)
        return shapes

"""The one decoder that runs every family: embeddings, layers, final norm, output head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine.kernels.fused.ref import rotate, softcap
from qengine.layers.activation import Activation
from qengine.layers.attention import AttentionContext
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.norm import HeadNorm, Norm, RMSNorm
from qengine.layers.rope import Rope, Rotary
from qengine.models.spec import ModelSpec


class Attention:
    """Self-attention of one layer.

    inputs: the linears that make q, k and v, in this order: one joined, or three. head_norm: over q and k heads at
    once. full_norms: over all of q and all of k (OLMo 2).
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        inputs: Sequence[Linear],
        output: Linear,
        head_norm: HeadNorm | None,
        full_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> None:
        self.index = index
        self.inputs = tuple(inputs)
        self.output = output
        self.head_norm = head_norm
        self.full_norms = full_norms
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale, self.softcap = spec.attn_scale, spec.attn_softcap
        self.window = spec.layers[index].sliding_window

    def __call__(self, x: torch.Tensor, rotary: Rotary | None, attn: AttentionContext) -> torch.Tensor:
        """X [T, H], normed -> [T, H]."""
        rows, turning = x.shape[0], self.heads + self.kv_heads
        qkv = self.inputs[0](x) if len(self.inputs) == 1 else torch.cat([linear(x) for linear in self.inputs], dim=-1)
        if self.full_norms is not None:
            split = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
            q, k, v = qkv.split(split, dim=-1)
            qkv = torch.cat((self.full_norms[0](q), self.full_norms[1](k), v), dim=-1)
        heads = qkv.view(rows, -1, self.head_dim)
        qk, v = heads[:, :turning], heads[:, turning:]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if rotary is not None:
            qk = rotate(qk, rotary.cos, rotary.sin, rotary.interleaved)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        mixed = attn.attend(self.index, q, k, v, scale=self.scale, softcap=self.softcap, sliding_window=self.window)
        return self.output(mixed.reshape(rows, -1))


class MLP:
    """down(act(gate(x)) * up(x)). inputs: gate and up, in this order: one joined, or two."""

    def __init__(self, act: Activation, size: int, inputs: Sequence[Linear], output: Linear) -> None:
        self.act = act
        self.size = size
        self.inputs = tuple(inputs)
        self.output = output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, H], normed -> [T, H]."""
        if len(self.inputs) == 1:
            both = self.inputs[0](x)
            gate, up = both[:, : self.size], both[:, self.size :]
        else:
            gate, up = self.inputs[0](x), self.inputs[1](x)
        return self.output(self.act(gate) * up)


class DecoderLayer:
    """One layer. norms: on the input and output of attention, then of the MLP; None where the family has none.

    The residual stream is in the dtype of `hidden`; the sublayers compute in `dtype`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        attention: Attention,
        mlp: MLP,
        norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None],
        rope: Rope | None,
        linears: dict[str, Linear],
    ) -> None:
        self.dtype = dtype
        self.attention = attention
        self.mlp = mlp
        self.norms = norms
        self.rope = rope
        self.parallel = spec.parallel_residual
        self._linears = linears

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, attn: AttentionContext) -> torch.Tensor:
        """hidden [T, H], positions int64 [T] -> hidden [T, H]."""
        return self.forward(hidden, self.rotary(positions, attn), attn)

    def rotary(self, positions: torch.Tensor, attn: AttentionContext) -> Rotary | None:
        """The angles that `forward` wants; layers with the same `rope` may share them."""
        if self.rope is None:
            return None
        lengths = attn.token_lengths(positions.device) if self.rope.spec.needs_lengths else None
        return self.rope.rotary(positions, lengths, self.dtype)

    def forward(self, hidden: torch.Tensor, rotary: Rotary | None, attn: AttentionContext) -> torch.Tensor:
        """As __call__, with the angles already computed."""
        attention_in, attention_out, mlp_in, mlp_out = self.norms
        x = hidden if attention_in is None else attention_in(hidden)
        mixed = self.attention(x, rotary, attn)
        if attention_out is not None:
            mixed = attention_out(mixed)
        hidden = hidden + mixed
        if self.parallel:
            return hidden + self.mlp(x)
        x = self.mlp(hidden if mlp_in is None else mlp_in(hidden))
        return hidden + (x if mlp_out is None else mlp_out(x))

    def linears(self) -> dict[str, Linear]:
        """By the checkpoint's names, relative to the layer; joined ones as "self_attn.q_proj+k_proj+v_proj"."""
        return dict(self._linears)

    def nbytes(self) -> int:
        """Bytes of the weights."""
        norms = [self.attention.head_norm, *(self.attention.full_norms or ()), *self.norms]
        linears = sum(linear.nbytes() for linear in self._linears.values())
        return linears + sum(norm.nbytes() for norm in norms if norm is not None)


class Decoder:
    """A whole model on one device. dtype: of the sublayers and of the final hidden states."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Linear,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H], scaled, in the residual stream's dtype."""
        return self.embedding(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionContext) -> torch.Tensor:
        """Token ids and positions, int64 [T] -> hidden states [T, H] after the final norm."""
        hidden = self.embedding(input_ids)
        angles: dict[int, Rotary | None] = {}
        for layer in self.layers:
            key = id(layer.rope)
            if key not in angles:
                angles[key] = layer.rotary(positions, attn)
            hidden = layer.forward(hidden, angles[key], attn)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [R, H] -> float32 [R, vocab_size]."""
        logits = self.head(hidden).float()
        return logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap)

    def memory_bytes(self) -> int:
        """Bytes of all weights; an embedding that the head shares counts once."""
        shared = self.head.dense_weight() is self.embedding.weight
        head = 0 if shared else self.head.nbytes()
        return self.embedding.nbytes() + sum(layer.nbytes() for layer in self.layers) + self.norm.nbytes() + head

    def describe(self) -> dict[str, int]:
        """How many linears each implementation computes, the head included."""
        counts: dict[str, int] = {}
        for linear in [*(x for layer in self.layers for x in layer.linears().values()), self.head]:
            counts[linear.describe()] = counts.get(linear.describe(), 0) + 1
        return counts

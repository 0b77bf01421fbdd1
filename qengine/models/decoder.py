"""The one decoder that runs every family: embeddings, layers, final norm, output head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qengine.kernels.fused.ref import softcap
from qengine.layers.activation import GatedActivation
from qengine.layers.attention import AttentionContext, AttentionShape
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.norm import HeadNorm, Norm, RMSNorm
from qengine.layers.residual import Pending, add_and_norm
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
        self.full_norms = full_norms
        self.shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.attn_scale,
            spec.attn_softcap,
            spec.layers[index].sliding_window,
            head_norm,
        )

    def __call__(
        self, x: torch.Tensor, rotary: Rotary | None, attn: AttentionContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """X [T, H], normed -> [T, H], or [R, H] where only `rows`, int64 [R], are wanted."""
        qkv = self.inputs[0](x) if len(self.inputs) == 1 else torch.cat([linear(x) for linear in self.inputs], dim=-1)
        if self.full_norms is not None:
            kv = self.shape.kv_heads * self.shape.head_dim
            q, k, v = qkv.split([self.shape.heads * self.shape.head_dim, kv, kv], dim=-1)
            qkv = torch.cat((self.full_norms[0](q), self.full_norms[1](k), v), dim=-1)
        out = attn.attend_joined(self.index, qkv, rotary, self.shape)
        return self.output(out if rows is None else out.index_select(0, rows))


class MLP:
    """down(act(gate(x)) * up(x)). inputs: gate and up, in this order, or one that has both and is given the gate."""

    def __init__(self, act: GatedActivation, inputs: Sequence[Linear], output: Linear) -> None:
        self.act = act
        self.inputs = tuple(inputs)
        self.output = output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, H], normed -> [T, H]."""
        if len(self.inputs) == 1:
            return self.output(self.inputs[0](x))
        return self.output(self.act(self.inputs[0](x), self.inputs[1](x)))


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
        """hidden [T, H], positions int64 [T] -> hidden [T, H], a new tensor."""
        own = hidden if hidden.is_cpu else hidden.clone()
        return add_and_norm(*self.forward(own, None, self.rotary(positions, attn), attn), None)[0]

    def rotary(self, positions: torch.Tensor, attn: AttentionContext) -> Rotary | None:
        """The angles that `forward` wants; layers with the same `rope` may share them."""
        if self.rope is None:
            return None
        lengths = attn.token_lengths(positions.device) if self.rope.spec.needs_lengths else None
        return self.rope.rotary(positions, lengths, self.dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        pending: Pending | None,
        rotary: Rotary | None,
        attn: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Pending]:
        """(hidden, what is still to be added to it) after this layer; the same two come from the layer before.

        rows: int64 [R], the tokens that are wanted; keys and values are kept of all. None: every one.
        """
        attention_in, attention_out, mlp_in, mlp_out = self.norms
        hidden, x = add_and_norm(hidden, pending, attention_in)
        mixed = self.attention(x, rotary, attn, rows)
        if rows is not None:
            hidden, x = hidden.index_select(0, rows), x.index_select(0, rows)
        if self.parallel:
            return hidden + mixed, Pending(self.mlp(x))
        hidden, x = add_and_norm(hidden, Pending(mixed, attention_out), mlp_in)
        return hidden, Pending(self.mlp(x), mlp_out)

    def linears(self) -> dict[str, Linear]:
        """By the checkpoint's names, relative to the layer; joined ones as "self_attn.q_proj+k_proj+v_proj"."""
        return dict(self._linears)

    def nbytes(self) -> int:
        """Bytes of the weights."""
        norms = [self.attention.shape.head_norm, *(self.attention.full_norms or ()), *self.norms]
        linears = sum(linear.nbytes() for linear in self._linears.values())
        return linears + sum(norm.nbytes() for norm in norms if norm is not None)


class Decoder:
    """A whole model on one device. dtype: of the sublayers and of the final hidden states.

    memory: the pool that the weights were allocated from, which has to live as long as they do; None on a CPU.
    """

    memory: torch.cuda.MemPool | None = None

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

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids and positions, int64 [T] -> hidden states [T, H] after the final norm.

        rows: int64 [R], the tokens whose hidden states [R, H] are wanted: the last layer computes no others.
        """
        hidden = self.embedding(input_ids)
        pending: Pending | None = None
        angles: dict[int, Rotary | None] = {}
        for index, layer in enumerate(self.layers):
            key = id(layer.rope)
            if key not in angles:
                angles[key] = layer.rotary(positions, attn)
            wanted = rows if index + 1 == len(self.layers) else None
            hidden, pending = layer.forward(hidden, pending, angles[key], attn, wanted)
        return add_and_norm(hidden, pending, self.norm)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [R, H] -> float32 [R, vocab_size]."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the dtype that they are computed in."""
        logits = self.head(hidden)
        return logits if self.spec.logit_softcap is None else softcap(logits.float(), self.spec.logit_softcap)

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

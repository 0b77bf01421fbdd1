"""Where a card's memory would go, and how many tokens of cache are left, part by part.

Weights and cache are arithmetic. What a step, its CUDA graphs and the driver take is measured by the engine when it
starts; here it is estimated by the constants below, which state where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.kernels.paged_attn.cache import BlockLayout, Kind
from qengine.models.spec import ModelSpec
from qengine.plan.weights import ModelWeights

GIB = 1024**3
CONTEXT_BYTES = int(0.73 * GIB)
"""CUDA context, cuBLAS and compiled kernels, as measured on an H200 (CUDA 13); smaller cards should need less."""
GRAPH_BYTES = 16 << 20
"""All decode graphs: they share the memory of the largest, which is counted with the step."""
MARGIN_BYTES = 96 << 20
"""What the engine leaves free (engine/device_loading.py)."""
WORKSPACE_BYTES = (32 << 20, 256 << 20)
"""The packed product's scratch memory on cards below and above LARGE_CARD_GIB (kernels/w4a16/ops.py)."""
LARGE_CARD_GIB = 30
LOGIT_BYTES = 10
"""Bytes for each logit of a step: float16 as computed, float32, and one float32 copy while sampling."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. limit: what the process may take. parts: name -> bytes, the cache's apart. host: pinned CPU memory."""

    limit: int
    parts: dict[str, int]
    host: dict[str, int]

    @property
    def free(self) -> int:
        """What is left for the cache; negative if the rest does not fit."""
        return self.limit - sum(self.parts.values())


def memory_plan(
    weights: ModelWeights,
    *,
    limit: int,
    card_gib: float,
    embedding_on_host: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    graphs: bool,
) -> MemoryPlan:
    """Everything but the cache."""
    spec = weights.spec
    parts = {"layers": weights.layer_bytes + weights.vectors, "head": weights.head.nbytes}
    host: dict[str, int] = {}
    (host if embedding_on_host else parts)["embedding"] = weights.embedding_bytes
    parts["step"] = step_bytes(spec, max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
    parts["step"] += WORKSPACE_BYTES[card_gib >= LARGE_CARD_GIB]
    parts["graphs"] = GRAPH_BYTES if graphs else 0
    parts["context"] = CONTEXT_BYTES
    parts["margin"] = MARGIN_BYTES
    return MemoryPlan(limit, parts, host)


def step_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Activations of the largest prompt step, and those, with logits, of the largest decode step, kept by its graph.

    float16. An H200 measured 0.295 GiB for Llama-2-7B (2,048 tokens, 256 rows), this gives 0.27.
    """
    wide = 4 if spec.residual_float32 else 2
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention = qkv + spec.num_heads * spec.head_dim
    mlp = 3 * spec.intermediate_size
    each = spec.hidden_size * (wide + 2 * 2) + 2 * max(attention, mlp)
    return tokens * each + rows * (each + spec.vocab_size * LOGIT_BYTES)


def cache_tokens(spec: ModelSpec, kind: Kind, block_size: int, nbytes: int) -> int:
    """Tokens that a cache of `nbytes` holds, in whole blocks; 0 if none."""
    layout = BlockLayout(kind, spec.num_kv_heads, spec.head_dim, block_size)
    return max(0, nbytes // (spec.num_layers * layout.block_bytes)) * block_size


def bytes_per_token(spec: ModelSpec, kind: Kind, block_size: int) -> float:
    """Bytes of cache for a token, over all layers."""
    return spec.num_layers * BlockLayout(kind, spec.num_kv_heads, spec.head_dim, block_size).block_bytes / block_size


def users_at(tokens: int, length: int, block_size: int) -> int:
    """Sequences of `length` tokens that a cache of `tokens` holds at once."""
    return tokens // (-(-length // block_size) * block_size)

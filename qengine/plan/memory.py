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
CONTEXT_BYTES = int(0.68 * GIB)
"""CUDA context and compiled kernels, as measured on an H200 (CUDA 13); smaller cards should need less."""
GRAPH_LAYER_BYTES = 30 << 10
"""A captured graph for each layer (engine/device_loading.py)."""
GRAPHS = 77
"""Graphs that may be captured with 256 sequences and 1,024 tokens or more in a step."""
MARGIN_BYTES = 80 << 20
"""What the engine leaves free (engine/device_loading.py)."""
WORKSPACE_BYTES = (32 << 20, 256 << 20)
"""The packed product's scratch memory where memory is spared and on other large cards (kernels/w4a16/ops.py)."""
LARGE_CARD_GIB = 30
CAPTURED_TOKENS = 1024
"""Most tokens of a step that is captured as a graph."""
SAMPLER_ROW_BYTES = 67_000
SAMPLER_LOGIT_BYTES = 0.44
"""The sampler's scratch memory for each row, and for each logit of a row (kernels/fused/sampling.py: Workspace)."""
PIECES_BYTES = 30 << 20
PIECES_SHARE = 0.2
"""What the allocator takes beyond a step's tensors, which it maps in pieces of 20 MiB: in all, and of their size. Both
from steps measured on an H200, 0.203 GiB for Llama-2-7B and 0.336 for Qwen2.5-7B (1,024 tokens, 256 rows)."""


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
    spare: bool,
    embedding_on_host: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    graphs: bool,
) -> MemoryPlan:
    """Everything but the cache. spare: the defaults spare memory (config.SMALL_CARD_GIB)."""
    spec = weights.spec
    parts = {"layers": weights.layer_bytes + weights.vectors, "head": weights.head.nbytes}
    host: dict[str, int] = {}
    (host if embedding_on_host else parts)["embedding"] = weights.embedding_bytes
    parts["step"] = step_bytes(spec, max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
    parts["step"] += WORKSPACE_BYTES[card_gib >= LARGE_CARD_GIB and not spare]
    parts["graphs"] = GRAPHS * spec.num_layers * GRAPH_LAYER_BYTES if graphs else 0
    parts["context"] = CONTEXT_BYTES
    parts["margin"] = MARGIN_BYTES
    return MemoryPlan(limit, parts, host)


def step_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Activations of the largest step, in 16 bits, and the sampler's memory.

    A step has its memory for itself, whether it runs as a graph or not: so the largest of two counts, one of all
    `tokens`, and one that is captured while the logits of its first run are kept.
    """
    wide = 4 if spec.residual_float32 else 2
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention = qkv + spec.num_heads * spec.head_dim
    mlp = 3 * spec.intermediate_size
    each = spec.hidden_size * (wide + 2 * 2) + 2 * max(attention, mlp)
    captured = min(tokens, CAPTURED_TOKENS) * each + rows * spec.vocab_size * 2
    sampler = rows * (SAMPLER_ROW_BYTES + SAMPLER_LOGIT_BYTES * spec.vocab_size)
    return int(max(tokens * each, captured) * (1 + PIECES_SHARE) + sampler) + PIECES_BYTES


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

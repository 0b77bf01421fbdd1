"""Predicted speeds, by the cost model of kernels/cost.py. Predictions, not measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from qengine.kernels.cards import Card
from qengine.kernels.cost import LinearShape, ModelShape, decode_step, prefill_step
from qengine.plan.weights import Matrix, ModelWeights

KV_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes of a number in the cache, without its share of the scales."""


@dataclass(frozen=True)
class Speeds:
    """decode: rows of users, context, ms a step, tokens a second in all and for each user. ttft: of one prompt."""

    decode: list[dict[str, Any]]
    ttft: list[dict[str, Any]]


def predict(
    weights: ModelWeights, card: Card, kind: str, *, users: list[int], context: int, prompts: list[int], chunk: int
) -> Speeds:
    """Decode steps of so many users at `context` tokens each, and the time to the first token of prompts alone.

    chunk: most tokens of a step. Raises CostError where kernels would have to be compiled and Triton is missing.
    """
    model, kv = model_shape(weights), KV_BYTES[kind]
    decode = []
    for count in users:
        step = decode_step(card, model, count, context, kv)
        each = {"tokens_per_s": step.tokens_per_s, "per_user": step.tokens_per_s / count}
        decode.append({"users": count, "context": context, "ms": step.ms, **each})
    ttft = [{"prompt": length, "ms": _prefill_ms(card, model, length, chunk)} for length in prompts]
    return Speeds(decode, ttft)


def _prefill_ms(card: Card, model: ModelShape, length: int, chunk: int) -> float:
    starts = range(0, length, chunk)
    return sum(prefill_step(card, model, min(chunk, length - start), start).ms for start in starts)


def model_shape(weights: ModelWeights) -> ModelShape:
    """The model as the cost model sees it: the linears of the most frequent kind of layer, joined as they are run."""
    spec = weights.spec
    kinds = Counter(tuple(_joined(layer)) for layer in weights.layers)
    linears = kinds.most_common(1)[0][0]
    head = weights.head
    return ModelShape(
        spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, linears,
        LinearShape(head.n, head.k, head.bits, head.group),
    )  # fmt: skip


def _joined(layer: tuple[Matrix, ...]) -> list[LinearShape]:
    """q, k, v as one and gate, up as one where they are held alike."""
    shapes: list[LinearShape] = []
    groups = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("o_proj",), ("gate_proj", "up_proj", "gate_up_proj"))
    for names in (*groups, ("down_proj",)):
        matrices = [m for m in layer if m.name.endswith(names)]
        if len({(m.k, m.bits, m.group) for m in matrices}) == 1:
            first = matrices[0]
            shapes.append(LinearShape(sum(m.n for m in matrices), first.k, first.bits, first.group))
        else:
            shapes += [LinearShape(m.n, m.k, m.bits, m.group) for m in matrices]
    return shapes

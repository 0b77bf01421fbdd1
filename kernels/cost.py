"""Predicted times: of a linear layer on a card, and of a whole decode or prefill step of a model. No GPU is needed.

    from qengine.kernels.cost import CARDS, MODELS, decode_step, prefill_step
    decode_step(CARDS["T4"], MODELS["Llama-2-7B"], sequences=1, context=1024).tokens_per_s

The model of a kernel is start + (busy^4.5 + latency^4.5)^(1/4.5) + parts, where busy is the root of the sum of squares
of memory, l2, issue and tensor, since no kernel hides the lesser ones wholly:

    memory   bytes of weights, scales, x and y / (peak bandwidth x the share that a copy reaches)
    l2       the same, but x as often as programs read it / bandwidth between the L2 cache and the multiprocessors
    issue    instructions of the main loop, one a cycle and scheduler, x turns of the busiest multiprocessor
    tensor   multiply-adds / those that the tensor cores do in a cycle, likewise
    latency  rounds of programs (as many at once as registers, shared memory and threads allow) x their turns x the
             cycles of a turn: its instructions, its products, and a wait for x
    parts    handing over and adding up the parts of a split
    start    launch: one constant a card

The form and its constants are those that come nearest to 3400 launches measured on an H200, where the launch of least
predicted time takes 5 % more than the fastest (7 % for shapes that constants were not fitted on).
Instructions are counted in machine code (`code_facts.py`). Every number of a card is in `cards.py`, with its source.
`python benchmarks/t4_model.py --h200` states how far the model is from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.kernels.cards import CARDS, Card
from qengine.kernels.code_facts import CostError
from qengine.kernels.kernel_cost import KernelCost, dense_time, kernel_time

__all__ = [
    "CARDS", "MODELS", "Card", "CostError", "KernelCost", "LinearShape", "ModelShape", "StepCost", "decode_step",
    "dense_time", "kernel_time", "linear_time", "prefill_step",
]  # fmt: skip

ATTENTION_RATE = 0.4
"""The share that causal attention of a prompt reaches of the mma.sync rate: an H200 with sm_75 code, TURING.md."""
SMALL_KERNELS = 6


@dataclass(frozen=True)
class LinearShape:
    """One linear layer: N x K, bits as packed (4, 8, or 16 for a plain fp16 weight), columns a group (0: one group)."""

    n: int
    k: int
    bits: int = 4
    group: int = 128


@dataclass(frozen=True)
class ModelShape:
    """What a step's time depends on. linears: of one layer, joined as they are run. head: the output layer.

    small_kernels: launches of a layer beside its linears and attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[LinearShape, ...]
    head: LinearShape
    small_kernels: int = SMALL_KERNELS


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step, by part. tokens: that the step computes. context: tokens in the cache before it."""

    tokens: int
    context: int
    ms: float
    linears_ms: float
    attention_ms: float
    head_ms: float
    small_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step a second."""
        return self.tokens / self.ms * 1e3


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, head_dim: int = 128
) -> ModelShape:
    query, both = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    shapes = ((both, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner))
    linears = tuple(LinearShape(n, k) for n, k in shapes)
    return ModelShape(layers, hidden, heads, kv_heads, head_dim, linears, LinearShape(vocab, hidden, 16, 0))


MODELS = {
    "Llama-2-7B": _llama(32, 4096, 32, 32, 11008, 32000),
    "Qwen2.5-7B": _llama(28, 3584, 28, 4, 18944, 152064),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14336, 128256),
    "Qwen2.5-14B": _llama(48, 5120, 40, 8, 13824, 152064),
}
"""Shapes of four models as INT4, group 128, with an fp16 head."""


def linear_time(card: Card, m: int, shape: LinearShape) -> KernelCost:
    """The cost of one linear layer for m rows: packed, or plain fp16 at 16 bits."""
    if shape.bits == 16:
        return dense_time(card, m, shape.n, shape.k)
    return kernel_time(card, m, shape.n, shape.k, shape.bits, shape.group)


def decode_step(card: Card, model: ModelShape, sequences: int, context: int, kv_bytes: float = 2.0) -> StepCost:
    """One decode step of `sequences` at `context` tokens each; kv_bytes: of one number in the cache (1 for int8)."""
    read = sequences * context * 2 * model.kv_heads * model.head_dim * kv_bytes
    attention = model.layers * (read / (card.peak * card.reach) / 1e3 + card.start)
    return _step(card, model, sequences, context, sequences, attention)


def prefill_step(card: Card, model: ModelShape, tokens: int, context: int = 0) -> StepCost:
    """One prefill step of a prompt's `tokens` after `context` tokens in the cache; one row of logits."""
    macs = 2 * model.heads * model.head_dim * tokens * (context + tokens / 2)
    rate = card.mma * card.count * card.clock * 1e3 * ATTENTION_RATE
    attention = model.layers * (macs / rate + card.start)
    return _step(card, model, tokens, context, 1, attention)


def _step(card: Card, model: ModelShape, rows: int, context: int, logits: int, attention_us: float) -> StepCost:
    linears = model.layers * sum(linear_time(card, rows, shape).us for shape in model.linears)
    small = model.small_kernels * model.layers * card.start
    head = linear_time(card, logits, model.head).us
    total = linears + small + head + attention_us
    return StepCost(rows, context, total / 1e3, linears / 1e3, attention_us / 1e3, head / 1e3, small / 1e3)

"""What the cost model expects of a load on this card, to print beside what was measured.

The load is scheduled as the engine does it (all running sequences decode, waiting ones are admitted in order while
tokens, sequences and cache allow; nothing is preempted), and every step is given the cost model's time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from qengine.bench.loads import Load
from qengine.errors import QEngineError
from qengine.kernels.cards import Card
from qengine.kernels.code_facts import CostError
from qengine.kernels.cost import ModelShape, decode_step, prefill_step
from qengine.plan.cards import this_card
from qengine.plan.speed import KV_BYTES, model_shape
from qengine.plan.weights import model_weights


@dataclass(frozen=True)
class Served:
    """How the engine was set: tokens of its cache, sequences at once, tokens a step, bytes of a number in the cache."""

    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: float


@dataclass(frozen=True)
class Predictor:
    """Predicts loads of one model on one card."""

    card: Card
    model: ModelShape
    served: Served

    def seconds(self, load: Load) -> float:
        """Of the whole load, all of whose requests arrive at once. Raises CostError."""
        waiting = deque(zip((len(prompt) for prompt in load.prompts), load.outputs, strict=True))
        running: list[list[int]] = []  # [tokens in the cache, prompt tokens still to compute, outputs still to come]
        total = 0.0
        while waiting or running:
            decoding = [seq for seq in running if not seq[1]]
            budget = self.served.max_num_batched_tokens - len(decoding)
            used = sum(seq[0] + seq[1] for seq in running)
            new = 0
            for seq in running:
                new += self._advance(seq, budget - new)
            while waiting and len(running) < self.served.max_num_seqs and new < budget:
                prompt, outputs = waiting[0]
                if running and used + prompt + 1 > self.served.pool_tokens:
                    break
                waiting.popleft()
                seq = [0, prompt, outputs]
                running.append(seq)
                used += prompt
                new += self._advance(seq, budget - new)
            total += self._step_ms(decoding, new)
            for seq in running:
                if not seq[1]:
                    seq[0], seq[2] = seq[0] + 1, seq[2] - 1
            running = [seq for seq in running if seq[2] > 0]
        return total / 1e3

    @staticmethod
    def _advance(seq: list[int], budget: int) -> int:
        """Compute prompt tokens of a sequence, as many as are left of the step."""
        count = max(0, min(seq[1], budget))
        seq[0] += count
        seq[1] -= count
        return count

    def _step_ms(self, decoding: list[list[int]], new: int) -> float:
        """A step of these sequences' tokens and `new` prompt tokens, whose linears are computed together."""
        context = round(sum(seq[0] for seq in decoding) / len(decoding)) if decoding else 0
        if not new:
            return decode_step(self.card, self.model, len(decoding), context, self.served.kv_bytes).ms
        time = prefill_step(self.card, self.model, new + len(decoding)).ms
        if decoding:
            time += decode_step(self.card, self.model, len(decoding), context, self.served.kv_bytes).attention_ms
        return time


def make_predictor(model: str, cache: dict[str, Any], settings: dict[str, Any], *, int8_head: bool) -> Predictor | str:
    """A Predictor for this machine's card, or why there can be none. cache: of the report; settings: of LLM."""
    from qengine.checkpoint import open_checkpoint
    from qengine.random_model import is_random, random_checkpoint

    card = this_card()
    if card is None:
        return "the card is not one that the cost model knows (kernels/cards.py)"
    kind = str(cache.get("dtype"))
    if kind not in KV_BYTES:
        return f"the cost model knows no cache of {kind}"
    try:
        ckpt = random_checkpoint(model, "cpu") if is_random(model) else open_checkpoint(model)
        weights = model_weights(
            ckpt,
            dtype=torch.bfloat16 if settings.get("dtype") in ("bfloat16", "bf16") else torch.float16,
            int8_head=int8_head,
            embedding_on_host=False,
        )
    except QEngineError as error:
        return str(error)
    served = Served(
        cache["tokens"],
        int(settings.get("max_num_seqs") or 256),
        int(settings.get("max_num_batched_tokens") or 2048),
        KV_BYTES[kind],
    )
    return Predictor(card.card, model_shape(weights), served)


def predicted_rate(predictor: Predictor, load: Load) -> float | None:
    """Output tokens a second; None where machine code that the model reads is not to be had."""
    try:
        return load.output_tokens / predictor.seconds(load)
    except CostError:
        return None

"""The whole plan of one model on one card, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from qengine.checkpoint import Checkpoint
from qengine.config import SMALL_CARD_GIB
from qengine.errors import ConfigError
from qengine.kernels.code_facts import CostError
from qengine.kernels.paged_attn.cache import Kind
from qengine.models.spec import ModelSpec
from qengine.plan.cards import PlanCard
from qengine.plan.memory import GIB, MemoryPlan, bytes_per_token, cache_tokens, memory_plan, users_at
from qengine.plan.speed import predict
from qengine.plan.weights import ModelWeights, model_weights

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
PROMPTS = (512, 2000)


@dataclass(frozen=True)
class PlanOptions:
    """As the engine's settings of the same names. memory_gib: most memory of the process (gpu_memory_limit)."""

    memory_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    embedding_on_host: bool | None = None
    lm_head_dtype: str = "auto"
    enforce_eager: bool = False


@dataclass
class Plan:
    """fits: a sequence of at least two tokens can be served. max_model_len: most tokens of a sequence, after lowering.

    cache: kind -> tokens, bytes a token, users at each length. speeds: predictions, or why there are none.
    """

    model: str
    architecture: str
    card: PlanCard
    options: PlanOptions
    dtype: str
    kind: str
    memory: MemoryPlan
    fits: bool
    max_model_len: int
    asked_model_len: int
    cache: dict[str, dict[str, Any]]
    speeds: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; sizes in GiB."""
        memory = self.memory
        return {
            "model": self.model,
            "architecture": self.architecture,
            "gpu": self.card.name,
            "gpu_memory_gib": self.card.memory_gib,
            "limit_gib": memory.limit / GIB,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kind,
            "choices": self.choices,
            "fits": self.fits,
            "max_model_len": self.max_model_len,
            "asked_model_len": self.asked_model_len,
            "gpu_gib": {name: size / GIB for name, size in memory.parts.items()} | {"cache": memory.free / GIB},
            "host_gib": {name: size / GIB for name, size in memory.host.items()},
            "cache": self.cache,
            "predicted": self.speeds,
            "advice": self.advice,
            "options": asdict(self.options),
        }


def plan_model(ckpt: Checkpoint, card: PlanCard, options: PlanOptions, name: str | None = None) -> Plan:
    """Plan without loading. name: what to call the model, None for its path.

    Raises ConfigError, CheckpointError and UnsupportedError as loading would.
    """
    limit_gib = options.memory_gib or card.memory_gib * options.gpu_memory_utilization
    if limit_gib > card.memory_gib:
        raise ConfigError(
            f"memory={options.memory_gib:g} GiB is more than the {card.memory_gib:.1f} GiB of {card.name}; lower it"
        )
    small = min(card.memory_gib, options.memory_gib or card.memory_gib) < SMALL_CARD_GIB
    on_host = small if options.embedding_on_host is None else options.embedding_on_host
    int8_head = options.lm_head_dtype == "int8" or (options.lm_head_dtype == "auto" and small)
    dtype = compute_dtype(options.dtype, ckpt, card)
    weights = model_weights(ckpt, dtype=dtype, int8_head=int8_head, embedding_on_host=on_host)
    spec, kind = weights.spec, cache_kind(options.kv_cache_dtype, dtype, small, card)
    memory = memory_plan(
        weights,
        limit=int(limit_gib * GIB),
        card_gib=card.memory_gib,
        spare=small,
        embedding_on_host=on_host,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        graphs=not options.enforce_eager,
    )
    asked = options.max_model_len or spec.max_position
    cache = cache_table(spec, memory, dtype, card, options, asked)
    tokens = cache[kind]["tokens"]
    plan = Plan(
        name or str(ckpt.path), spec.architecture, card, options, _name(dtype), kind, memory, tokens >= 2,
        min(asked, tokens), asked, cache,
    )  # fmt: skip
    plan.choices = {"embedding_on_host": on_host, "int8_head": weights.head.bits == 8, "quantization": weights.method}
    plan.speeds = speeds(weights, plan) if plan.fits else {"unavailable": "the model does not fit"}
    plan.advice = advice(plan, small)
    return plan


def compute_dtype(name: str, ckpt: Checkpoint, card: PlanCard) -> torch.dtype:
    """Float16 or bfloat16, as loading would choose it on this card. Raises ConfigError for others."""
    text = ckpt.text_config()
    if name == "auto":
        stored = str(text.get("dtype") or text.get("torch_dtype")).removeprefix("torch.")
        name = "bfloat16" if stored == "bfloat16" and card.card.sm >= 80 else "float16"
    if name not in ("float16", "bfloat16"):
        raise ConfigError(f"dtype={name!r} is not served on a GPU; use 'float16' or 'bfloat16'")
    if name == "bfloat16" and card.card.sm < 80:
        raise ConfigError(f"{card.name} has no bfloat16; use dtype 'float16'")
    return torch.float16 if name == "float16" else torch.bfloat16


def cache_kind(name: str, dtype: torch.dtype, small: bool, card: PlanCard) -> Kind:
    """How the cache would hold values. Raises ConfigError for what the card or dtype cannot have."""
    plain = _name(dtype)
    if name == "auto":
        name = "int8" if small else plain
    if name not in kinds(dtype, card):
        raise ConfigError(f"kv_cache_dtype={name!r} is not to be had here; use one of {', '.join(kinds(dtype, card))}")
    return cast(Kind, name)


def kinds(dtype: torch.dtype, card: PlanCard) -> tuple[str, ...]:
    """The kinds of cache that the card can have with this compute dtype."""
    return (_name(dtype), "int8", *(("fp8",) if card.card.sm >= 89 else ()), "int4")


def cache_table(
    spec: ModelSpec, memory: MemoryPlan, dtype: torch.dtype, card: PlanCard, options: PlanOptions, longest: int
) -> dict[str, dict[str, Any]]:
    """For each kind of cache: tokens, bytes a token, users at each length up to the longest sequence.

    As in the engine, no more than max_num_seqs of the longest sequences can use.
    """
    block_size = options.block_size
    most = -(-longest // block_size) * block_size * options.max_num_seqs
    table: dict[str, dict[str, Any]] = {}
    for kind in kinds(dtype, card):
        try:
            tokens = min(most, cache_tokens(spec, cast(Kind, kind), block_size, memory.free))
            each = bytes_per_token(spec, cast(Kind, kind), block_size)
        except ValueError as error:
            raise ConfigError(f"{spec.architecture} on a GPU: {error}") from None
        lengths = [length for length in LENGTHS if length <= longest] or [longest]
        users = {str(length): users_at(tokens, length, block_size) for length in lengths}
        table[kind] = {"tokens": tokens, "bytes_per_token": each, "users": users}
    return table


def speeds(weights: ModelWeights, plan: Plan) -> dict[str, Any]:
    """Predicted decode and prefill speeds with the chosen cache, up to what fits and may run at once."""
    tokens, longest = plan.cache[plan.kind]["tokens"], plan.max_model_len
    context = min(CONTEXT, max(1, longest - 1))
    most = max(1, min(users_at(tokens, context, plan.options.block_size), plan.options.max_num_seqs))
    users = [count for count in USERS if count < most] + [most]
    prompts = [length for length in PROMPTS if length < longest]
    chunk = plan.options.max_num_batched_tokens
    try:
        found = predict(weights, plan.card.card, plan.kind, users=users, context=context, prompts=prompts, chunk=chunk)
    except CostError as error:
        return {"unavailable": str(error)}
    return {"decode": found.decode, "ttft": found.ttft}


def advice(plan: Plan, small: bool) -> list[str]:
    """What to change if it does not fit, or if the longest sequences do not."""
    memory = plan.memory
    lines: list[str] = []
    if plan.fits and plan.max_model_len >= plan.asked_model_len:
        return lines
    need = plan.asked_model_len * plan.cache[plan.kind]["bytes_per_token"]
    short = (need - memory.free) / GIB
    if plan.fits:
        lines.append(
            f"max_model_len is lowered from {plan.asked_model_len} to {plan.max_model_len}: one sequence of that "
            f"length needs {need / GIB:.2f} GiB of cache, {max(0.0, short):.2f} more than is left"
        )
    else:
        lines.append(f"it does not fit: {-memory.free / GIB:.2f} GiB are missing before any cache")
    if plan.kind in ("float16", "bfloat16"):
        lines.append("--kv-cache-dtype int8 halves the cache's tokens' size")
    if memory.parts.get("embedding"):
        lines.append(f"--embedding-on-host frees {memory.parts['embedding'] / GIB:.2f} GiB")
    if not plan.choices["int8_head"] and plan.options.lm_head_dtype != "int8":
        lines.append("--lm-head-dtype int8 halves a dense output head")
    if plan.options.max_num_batched_tokens > 512:
        lines.append(f"--max-num-batched-tokens 512 shrinks the step of {memory.parts['step'] / GIB:.2f} GiB")
    if plan.options.memory_gib is None and plan.options.gpu_memory_utilization < 0.95:
        lines.append(f"--gpu-memory-utilization 0.98 gives the process more of the {plan.card.memory_gib:.1f} GiB")
    return lines


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""From settings to a running engine: checkpoint, tokenizer, model, cache, engine, in that order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qengine.allocator import growing_segments
from qengine.checkpoint import Checkpoint, open_checkpoint
from qengine.config import EngineConfig, ModelConfig
from qengine.engine.block_manager import BlockManager
from qengine.engine.engine import Engine
from qengine.engine.gpu_memory import is_small
from qengine.engine.host_memory import TouchedMemory
from qengine.engine.limits import Limits
from qengine.engine.memory import CachePlan, available_cpu_bytes, plan_cache
from qengine.engine.runner import Runner
from qengine.engine.scheduler import Scheduler
from qengine.engine.swap_setup import SwappingRunner, cpu_blocks, set_up_swap
from qengine.errors import CapacityError, CheckpointError, ConfigError
from qengine.layers.attention import KVCache
from qengine.models import Decoder, load_model, model_spec
from qengine.models.loading import Placement
from qengine.models.spec import ModelSpec
from qengine.quant import open_weights
from qengine.random_model import is_random, random_checkpoint
from qengine.structured.grammars import GrammarStore

if TYPE_CHECKING:
    from qengine.engine.device_loading import MemoryUse

Progress = Callable[[int, int], None]


@dataclass
class Loaded:
    """A running engine with what its front needs: tokenizer, the checkpoint's sampling defaults, model.

    block_bytes: of a cache block over all layers. memory: what a GPU's memory is taken by; None on a CPU.
    """

    engine: Engine
    tokenizer: Any
    generation_config: dict[str, Any]
    model: Decoder
    block_bytes: int
    memory: MemoryUse | None = None


def load_engine(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Open, check and load a model. Everything that can be refused without its weights is refused first."""
    settings = config.model
    device = resolve_device(config.device.device)
    if is_random(settings.model):
        ckpt = random_checkpoint(settings.model, device, settings.seed)
    else:
        ckpt = open_checkpoint(settings.model, revision=settings.revision, allow_pickle=settings.allow_pickle)
    refuse_remote_code(ckpt, settings)
    spec = model_spec(ckpt)
    check_quantization(open_weights(ckpt).method, settings)
    dtype = resolve_dtype(settings.dtype, ckpt.text_config(), device)
    check_cache_dtype(config, spec, dtype, device)
    max_model_len = resolve_max_model_len(settings, spec)
    tokenizer = None if settings.skip_tokenizer_init else load_tokenizer(ckpt, settings)
    eos_ids, bos_ids = special_tokens(ckpt, tokenizer)
    known = spec.vocab_size if tokenizer is None else min(spec.vocab_size, max(tokenizer.get_vocab().values()) + 1)
    touched = touched_memory(config, spec, dtype, device)
    try:
        model, runner, plan, memory = load_runner(ckpt, config, dtype, device, max_model_len, known, progress)
    except BaseException:
        if touched is not None:
            touched.close()
        raise
    limits = Limits(
        vocab_size=spec.vocab_size,
        sample_vocab=known,
        max_model_len=plan.max_model_len,
        pool_tokens=plan.num_blocks * config.cache.block_size,
        eos_ids=frozenset(t for t in eos_ids if 0 <= t < spec.vocab_size),
        bos_id=next((t for t in bos_ids if 0 <= t < spec.vocab_size), None),
        max_logprobs=settings.max_logprobs,
        switch_length=spec.rope_switch_length,
    )
    if device.type == "cuda":
        num_cpu_blocks, swap_memory = (0, None) if touched is None else (touched.num_blocks, touched.take())
    else:
        num_cpu_blocks, swap_memory = cpu_blocks(config.cache, runner.block_bytes, available_cpu_bytes()), None
    policy, num_cpu_blocks = set_up_swap(runner, config, limits.max_len, num_cpu_blocks, device.type, swap_memory)
    blocks = BlockManager(
        plan.num_blocks,
        config.cache.block_size,
        enable_prefix_caching=prefix_caching(config, spec),
        num_cpu_blocks=num_cpu_blocks,
        policy=policy,
    )
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_len=limits.max_len,
        policy=config.scheduler.scheduling_policy,
        ageing=config.scheduler.priority_ageing,
    )
    grammars = GrammarStore(tokenizer, known, limits.eos_ids, config.structured)
    engine = Engine(runner, scheduler, limits, tokenizer, grammars=grammars, seed=settings.seed)
    return Loaded(engine, tokenizer, ckpt.generation_config, model, runner.block_bytes, memory)


def touched_memory(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> TouchedMemory | None:
    """The CPU tier's memory beside a GPU, made ready while the model loads; None where there is none."""
    if device.type != "cuda":
        return None
    from qengine.engine.device_loading import block_bytes

    nbytes = block_bytes(config, spec, dtype, device)
    blocks = cpu_blocks(config.cache, nbytes, available_cpu_bytes())
    return TouchedMemory(blocks, nbytes) if blocks else None


def load_runner(
    ckpt: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    vocab_size: int,
    progress: Progress | None,
) -> tuple[Decoder, SwappingRunner, CachePlan, MemoryUse | None]:
    """The model on its device, with the runner that has its cache; on a GPU kernels are compiled meanwhile."""
    place = placement(config, device)
    if device.type != "cuda":
        model = load_model(ckpt, dtype=dtype, device=device, placement=place, progress=progress)
        return model, *make_runner(model, config, dtype, max_model_len, vocab_size)
    from qengine.engine.dry_steps import precompiler

    growing_segments()
    ahead = precompiler(config, dtype, device, max_model_len, vocab_size)
    watch = None if ahead is None else ahead.watch
    try:
        model = load_model(ckpt, dtype=dtype, device=device, placement=place, progress=progress, watch=watch)
        made = make_runner(model, config, dtype, max_model_len, vocab_size)
    except BaseException:
        if ahead is not None:
            ahead.close()
        raise
    if ahead is not None:
        made[0].at_close(ahead.close)
        ahead.loaded()
    return model, *made


def check_cache_dtype(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError, before anything is loaded, for a cache that this device cannot have."""
    if device.type == "cuda":
        from qengine.engine.device_loading import cache_kind, cache_layout

        cache_layout(config, spec, cache_kind(config, dtype, device))
    elif config.cache.kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        raise ConfigError(
            f"kv_cache_dtype={config.cache.kv_cache_dtype!r} is not supported on a CPU with compute dtype {dtype}; "
            "use 'auto'"
        )


def placement(config: EngineConfig, device: torch.device) -> Placement:
    """Where the embedding and how the head is held, with "auto" resolved."""
    small, on_host = is_small(config.cache, device), config.model.embedding_on_host
    head = config.model.lm_head_dtype
    return Placement(
        embedding_on_host=device.type == "cuda" and (small if on_host is None else on_host),
        int8_head=head == "int8" or (head == "auto" and small),
    )


def make_runner(
    model: Decoder, config: EngineConfig, dtype: torch.dtype, max_model_len: int, vocab_size: int
) -> tuple[SwappingRunner, CachePlan, MemoryUse | None]:
    """The runner for the model's device, with its cache, and what that takes."""
    if model.device.type == "cuda":
        from qengine.engine.device_loading import device_runner

        return device_runner(model, config, dtype, max_model_len, vocab_size)
    plan, size = plan_cache(model, config, dtype, max_model_len), config.cache.block_size
    try:
        cache = KVCache.allocate(model.spec, plan.num_blocks, size, dtype, model.device)
    except RuntimeError as error:
        raise CapacityError(f"the KV cache of {plan.num_blocks} blocks cannot be allocated: {error}") from error
    return Runner(model, cache, size, vocab_size), plan, None


def refuse_remote_code(ckpt: Checkpoint, settings: ModelConfig) -> None:
    """Raise ConfigError for a checkpoint that names Python code of its own, unless it was trusted.

    The model's code is never run in any case: the architectures are this package's own.
    """
    if settings.trust_remote_code:
        return
    tokenizer_config = ckpt.read_json("tokenizer_config.json") or {}
    for file, content in (("config.json", ckpt.config), ("tokenizer_config.json", tokenizer_config)):
        if content.get("auto_map"):
            raise ConfigError(
                f"{ckpt.path}/{file} asks to run code of the checkpoint's own (auto_map: {content['auto_map']}); "
                "read that code, then pass trust_remote_code=True (--trust-remote-code)"
            )


def check_quantization(method: str | None, settings: ModelConfig) -> None:
    """Raise ConfigError if the checkpoint is not quantized as `quantization` says."""
    if settings.quantization is not None and settings.quantization != method:
        found = f"is quantized with {method!r}" if method else "is not quantized"
        remedy = f"pass quantization={method!r} or leave it out" if method else "leave it out, or convert the model"
        raise ConfigError(f"quantization={settings.quantization!r}, but {settings.model} {found}; {remedy}")


def resolve_device(name: str) -> torch.device:
    """ "auto" is cuda if there is a device, else cpu. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name!r}, but {count} CUDA devices are visible; use 'cpu' or run qengine doctor")
        device = torch.device("cuda", device.index or 0)
    return device


def resolve_dtype(name: str, text_config: dict[str, Any], device: torch.device) -> torch.dtype:
    """The compute type. "auto": float32 on a CPU; on a GPU bfloat16 if the checkpoint says so, else float16.

    bfloat16 on a card without it becomes float16, with a warning.
    """
    if name == "auto":
        stored = str(text_config.get("dtype") or text_config.get("torch_dtype")).removeprefix("torch.")
        name = "float32" if device.type == "cpu" else "bfloat16" if stored == "bfloat16" else "float16"
    if name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        card = torch.cuda.get_device_name(device)
        warnings.warn(f"{card} has no bfloat16 (it needs compute capability 8.0); float16 is used", stacklevel=2)
        name = "float16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_max_model_len(settings: ModelConfig, spec: ModelSpec) -> int:
    """The limit asked for, which must not exceed the model's, or the model's."""
    if settings.max_model_len is None:
        return spec.max_position
    if settings.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={settings.max_model_len} is more than the {spec.max_position} positions of the model; "
            "lower it, or give the checkpoint's config a rope scaling"
        )
    return settings.max_model_len


def prefix_caching(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether prefixes may be shared: not where a key depends on how long its whole sequence is."""
    if not config.cache.enable_prefix_caching:
        return False
    limit = config.model.max_model_len or spec.max_position
    for layer in spec.layers:
        rope = layer.rope
        if rope is not None and rope.needs_lengths:
            original = rope.params.get("original_max_position_embeddings", 0)
            if limit > original:
                warnings.warn(
                    f"prefix caching is off: the model's {rope.kind} rope depends on the length beyond {original} "
                    f"tokens; max_model_len={original} would allow it",
                    stacklevel=2,
                )
                return False
    return True


def load_tokenizer(ckpt: Checkpoint, settings: ModelConfig) -> Any:
    """The tokenizer by transformers. Raises CheckpointError if there is none."""
    from transformers import AutoTokenizer

    source = settings.tokenizer or str(ckpt.path)
    hint = "pass tokenizer=<folder or id>, or skip_tokenizer_init=True (--skip-tokenizer-init) to work with token ids"
    if is_random(source):
        raise CheckpointError(f"{source} has no tokenizer; {hint}")
    revision = settings.tokenizer_revision or (settings.revision if settings.tokenizer is None else None)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if revision and not Path(source).is_dir():
        options["revision"] = revision
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # transformers raises whatever its parsers do
        raise CheckpointError(
            f"no tokenizer can be loaded from {source}: {' '.join(str(error).split())}; {hint}"
        ) from error


def special_tokens(ckpt: Checkpoint, tokenizer: Any) -> tuple[set[int], list[int]]:
    """End tokens of generation_config.json, config.json and the tokenizer, all together; and BOS, if there is one."""
    config = ckpt.text_config()
    sources = [ckpt.generation_config.get("eos_token_id"), config.get("eos_token_id")]
    bos = config.get("bos_token_id")
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
        bos = tokenizer.bos_token_id
    return {token for ids in sources for token in token_ids(ids, "eos_token_id")}, token_ids(bos, "bos_token_id")


def token_ids(value: Any, key: str) -> list[int]:
    """A config's token id, list of them, or null, as a list. Raises CheckpointError."""
    ids = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(
                f"{key} is {value!r}, expected a token id or a list of them; correct config.json or "
                "generation_config.json"
            )
    return ids

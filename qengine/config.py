"""Every setting of the engine: its default, its meaning and its check. One frozen dataclass a subject.

Names, defaults and meaning are those vLLM users know. `EngineConfig.from_kwargs` sorts keyword arguments into the
subjects; a name nobody knows raises with the nearest known one, and a setting that cannot be honoured is refused.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any

from qengine.errors import ConfigError

DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "fp32": "float32",
}
QUANTIZATIONS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "auto-round": "auto-round",
}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KV_CACHE_KINDS = {"int8": "int8", "int4": "int4", "fp8": "fp8", "fp8_e4m3": "fp8"}
SMALL_CARD_GIB = 24
"""Below this a card's memory, or gpu_memory_limit, the defaults spare memory: see the settings called "auto"."""


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse `value` unless it is an int (not a bool) within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not allowed; give True or False")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _dtype_name(value: Any) -> str:
    """`value` ("fp16", "bfloat16", torch.float32, ...) as "auto", "float16", "bfloat16" or "float32"."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not known; allowed are {', '.join(sorted(DTYPES))}")
    return DTYPES[name]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its weights are read.

    model, revision: a folder or hub id, and the hub's branch, tag or commit. tokenizer, tokenizer_revision: another
    folder or id for the tokenizer. skip_tokenizer_init: no tokenizer; prompts and results are token ids only.
    trust_remote_code: allow a checkpoint whose `auto_map` asks to run Python of its own (only the tokenizer's is ever
    run). allow_pickle: read `.bin` weights. dtype: compute type; "auto" is float32 on a CPU and the checkpoint's type
    on a GPU. quantization: what the checkpoint must be; None takes what it says. max_model_len: most tokens of prompt
    and output together; None is the model's own limit. seed: base of the seeds of requests that give none.
    generation_config: "auto" takes sampling defaults from the model's generation_config.json where a call gives no
    sampling parameters; "vllm" takes SamplingParams' own. max_logprobs: most logprobs a request may ask for; -1 is
    no limit. strict: refuse a model whose max_model_len does not fit the memory, instead of lowering it with a warning.
    embedding_on_host: keep the embedding table in pinned CPU memory, from where the GPU reads the rows it needs; None
    does so where less than 24 GiB are there. lm_head_dtype: "model" keeps the
    output head as the checkpoint has it, "int8" quantizes a dense one to 8 bits at load (groups of 128 columns);
    "auto" is int8 where less than 24 GiB are there.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    seed: int = 0
    generation_config: str = "auto"
    max_logprobs: int = 20
    strict: bool = False
    embedding_on_host: bool | None = None
    lm_head_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} is not allowed; give a folder or a Hugging Face model id")
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        for name in ("skip_tokenizer_init", "trust_remote_code", "allow_pickle", "strict"):
            _boolean(name, getattr(self, name))
        if self.embedding_on_host is not None:
            _boolean("embedding_on_host", self.embedding_on_host)
        if self.lm_head_dtype not in ("auto", "model", "int8"):
            raise ConfigError(f"lm_head_dtype={self.lm_head_dtype!r} is not allowed; give 'auto', 'model' or 'int8'")
        if self.quantization is not None:
            if self.quantization not in QUANTIZATIONS:
                known = ", ".join(QUANTIZATIONS)
                raise ConfigError(f"quantization={self.quantization!r} is not known; allowed are None, {known}")
            object.__setattr__(self, "quantization", QUANTIZATIONS[self.quantization])
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 1)
        _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(f"generation_config={self.generation_config!r} is not allowed; give 'auto' or 'vllm'")
        _integer("max_logprobs", self.max_logprobs, -1)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    block_size: tokens a block (on a GPU 8 to 1024). gpu_memory_utilization: share of the GPU's memory this process may
    use for weights, activations and cache. gpu_memory_limit: GiB that the whole process may take on the GPU, as NVML
    counts it (the CUDA context and kernels included), instead of the share; it is enforced. swap_space: GiB of CPU
    memory (pinned, beside a GPU) for blocks of preempted sequences and for those that the prefix cache gives up, at
    most half of what is free; 0: preempted sequences are computed anew. swap_threshold: blocks go there where computing
    their tokens takes at least this many times as long as copying them there and back, by rates measured at the start;
    0 always, inf never. enable_prefix_caching: reuse the blocks of equal prompt beginnings. kv_cache_dtype: the compute
    dtype by name, or on a GPU "int8", "int4" or "fp8" (from compute capability 8.9), with a scale for each token and
    head; "auto" is the compute dtype, and int8 on a GPU where less than 24 GiB are there. num_gpu_blocks_override: this
    many blocks instead of the measured number (also on a CPU). cpu_kv_cache_gib: most memory the cache takes on a CPU.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    gpu_memory_limit: float | None = None
    swap_space: float = 4
    swap_threshold: float = 1.0
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    cpu_kv_cache_gib: float = 4

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES or isinstance(self.block_size, bool):
            raise ConfigError(f"block_size={self.block_size!r} is not allowed; give one of {BLOCK_SIZES}")
        if not _is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} is not allowed; give a number in (0, 1]"
            )
        limit = self.gpu_memory_limit
        if limit is not None and (not _is_number(limit) or limit <= 0):
            raise ConfigError(f"gpu_memory_limit={limit!r} is not allowed; give GiB, more than 0, or None")
        for name in ("swap_space", "cpu_kv_cache_gib"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ConfigError(f"{name}={value!r} is not allowed; give GiB, 0 or more")
        if not (_is_number(self.swap_threshold) or self.swap_threshold == math.inf) or self.swap_threshold < 0:
            raise ConfigError(f"swap_threshold={self.swap_threshold!r} is not allowed; give 0 or more, or inf")
        _boolean("enable_prefix_caching", self.enable_prefix_caching)
        name = str(self.kv_cache_dtype).removeprefix("torch.")
        known = DTYPES | KV_CACHE_KINDS
        if name not in known:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not known; give 'auto', 'int8', 'int4', 'fp8' or the "
                "compute dtype's name"
            )
        object.__setattr__(self, "kv_cache_dtype", known[name])
        if self.num_gpu_blocks_override is not None:
            _integer("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens a step computes at most; longer prompts
    are computed in chunks. A step never holds more sequences than tokens, whatever max_num_seqs says.
    scheduling_policy: "fcfs" serves requests in the order of arrival; "priority" those of lower `priority` first, which
    may preempt running ones of higher. priority_ageing: seconds of waiting that make up for one level of priority, so
    that no request waits for ever; inf: none do.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    priority_ageing: float = 60.0

    def __post_init__(self) -> None:
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling_policy={self.scheduling_policy!r} is not allowed; give 'fcfs' or 'priority'")
        if not (_is_number(self.priority_ageing) or self.priority_ageing == math.inf) or self.priority_ageing <= 0:
            raise ConfigError(
                f"priority_ageing={self.priority_ageing!r} is not allowed; give seconds, more than 0, or inf"
            )
        _integer("max_num_seqs", self.max_num_seqs, 1)
        _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.enable_chunked_prefill is not True:
            raise ConfigError(
                f"enable_chunked_prefill={self.enable_chunked_prefill!r} is not supported: prompts longer than "
                "max_num_batched_tokens are always computed in chunks; raise max_num_batched_tokens to avoid chunks"
            )


@dataclass(frozen=True)
class DeviceConfig:
    """Where it runs. device: "auto" (cuda if there, else cpu), "cpu", "cuda" or "cuda:N".

    enforce_eager: never use CUDA graphs: a little less memory, slower small batches. compile_workers: processes that
    compile a GPU's kernels ahead while the model loads, where Triton's cache lacks them; "auto" is one a processor, as
    many as fit half of the free CPU memory, at most 16; 0: each kernel is compiled when it is first launched.
    """

    device: str = "auto"
    enforce_eager: bool = False
    compile_workers: int | str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", str(self.device))
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
            raise ConfigError(f"device={self.device!r} is not allowed; give 'auto', 'cpu', 'cuda' or 'cuda:N'")
        _boolean("enforce_eager", self.enforce_eager)
        if self.compile_workers != "auto":
            if isinstance(self.compile_workers, str):
                raise ConfigError(f"compile_workers={self.compile_workers!r} is not allowed; give 'auto' or a number")
            _integer("compile_workers", self.compile_workers, 0, 256)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            _integer(name, value, 1)
            if value > 1:
                raise ConfigError(f"{name}={value} is not supported by this version, which runs on one device; give 1")


@dataclass(frozen=True)
class StructuredConfig:
    """Structured output: how much of it is allowed and kept.

    structured_outputs_max_bytes: longest schema, regex, grammar or list of choices of a request, in bytes of UTF-8.
    structured_outputs_cache_mib: memory for compiled ones, of which those not used for longest are dropped.
    structured_outputs_threads: threads that compile, beside the engine's. structured_outputs_timeout: seconds that a
    request waits for that at most.
    """

    structured_outputs_max_bytes: int = 65536
    structured_outputs_cache_mib: float = 256
    structured_outputs_threads: int = 2
    structured_outputs_timeout: float = 60

    def __post_init__(self) -> None:
        _integer("structured_outputs_max_bytes", self.structured_outputs_max_bytes, 1)
        _integer("structured_outputs_threads", self.structured_outputs_threads, 1, 64)
        size = self.structured_outputs_cache_mib
        if not _is_number(size) or size < 0:
            raise ConfigError(f"structured_outputs_cache_mib={size!r} is not allowed; give MiB, 0 or more")
        limit = self.structured_outputs_timeout
        if not _is_number(limit) or limit <= 0:
            raise ConfigError(f"structured_outputs_timeout={limit!r} is not allowed; give seconds, more than 0")


@dataclass(frozen=True)
class EngineConfig:
    """All subjects together."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    structured: StructuredConfig

    @classmethod
    def from_kwargs(cls, **settings: Any) -> EngineConfig:
        """Sort flat settings into subjects. Raises ConfigError for unknown names and values that are not allowed.

        None means the default where the setting has no None of its own.
        """
        kinds = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "device": DeviceConfig,
            "structured": StructuredConfig,
        }
        owner = {f.name: (key, f) for key, kind in kinds.items() for f in fields(kind)}
        sorted_settings: dict[str, dict[str, Any]] = {key: {} for key in kinds}
        for name, value in settings.items():
            if name not in owner:
                raise ConfigError(_unknown(name, list(owner)))
            key, item = owner[name]
            if value is not None or item.default is None or name == "model":
                sorted_settings[key][name] = value
        return cls(**{key: kind(**sorted_settings[key]) for key, kind in kinds.items()})


def all_defaults() -> dict[str, Any]:
    """Setting -> default, for a command line."""
    kinds = (ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, StructuredConfig)
    return {item.name: item.default for kind in kinds for item in fields(kind) if item.name != "model"}


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known settings are {', '.join(sorted(known))}"
    return f"unknown setting {name!r}; {hint}"

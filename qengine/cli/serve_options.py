"""The options of `qengine serve`: names and help. Types and defaults are those of the settings' dataclasses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, Any, Optional

import typer

from qengine.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, StructuredConfig
from qengine.server.reasoning import REASONING_PARSERS
from qengine.server.settings import ServerSettings
from qengine.server.tools import TOOL_PARSERS

SERVER = {
    "host": "Address to listen at; 0.0.0.0 for all.",
    "port": "Port to listen at; 0 for a free one.",
    "api_key": "Key that requests must bring; may be repeated. Better in the environment, which `ps` does not show.",
    "served_model_name": "Name of the model in requests; may be repeated (default: MODEL).",
    "allowed_origins": "Origin of web pages that may call the server; may be repeated; * for all.",
    "root_path": "Path under which a proxy shows the server.",
    "ssl_keyfile": "PEM file of the TLS key.",
    "ssl_certfile": "PEM file of the TLS certificate.",
    "timeout_keep_alive": "Seconds that an idle connection stays open.",
    "max_concurrent_requests": "Requests under way; the next is answered 429.",
    "request_timeout": "Seconds after which a request is ended with an error (default: never).",
    "max_body_size": "Bytes of a request.",
    "max_choices": "Completions of a request: prompts times n.",
    "max_words": "Entries of a request's stop, and of its bad_words: each step looks through them.",
    "drain_timeout": "Seconds that open requests have after SIGTERM.",
    "health_timeout": "Seconds within which a healthy engine finishes a step.",
    "uvicorn_log_level": "critical, error, warning, info, debug or trace.",
    "disable_uvicorn_access_log": "No log line for each request.",
    "disable_fastapi_docs": "No /docs and /openapi.json.",
    "log_requests": "Write prompts and parameters to the log.",
    "max_log_len": "Characters of a prompt in the log (default: all).",
}
CHAT = {
    "chat_template": "Jinja file or text instead of the model's template.",
    "trust_request_chat_template": "Let requests bring templates.",
    "response_role": "Role of the answers.",
    "tool_call_parser": "How the model writes tool calls: " + ", ".join(TOOL_PARSERS) + ".",
    "enable_auto_tool_choice": "Let the model decide whether to call a tool.",
    "reasoning_parser": "How the model writes its reasoning, to be split off: " + ", ".join(REASONING_PARSERS) + ".",
}
ENGINE = {
    "tokenizer": "Folder or id of another tokenizer.",
    "revision": "Branch, tag or commit on the hub.",
    "tokenizer_revision": "The same of the tokenizer.",
    "dtype": "auto, float32, float16 or bfloat16.",
    "quantization": "What the checkpoint must be: awq, gptq, compressed-tensors.",
    "max_model_len": "Most tokens of prompt and output (default: the model's limit).",
    "device": "auto, cpu, cuda or cuda:N.",
    "tensor_parallel_size": "1: this version runs on one device.",
    "pipeline_parallel_size": "1: this version runs on one device.",
    "gpu_memory_utilization": "Share of the GPU's memory this process may use.",
    "gpu_memory_limit": "GiB that the process may take on the GPU, instead of the share.",
    "kv_cache_dtype": "auto, the compute type, or on a GPU int8, int4 or fp8.",
    "block_size": "Tokens a KV cache block.",
    "swap_space": "GiB of CPU memory for preempted sequences; 0: computed anew.",
    "swap_threshold": "Copy instead of computing where that takes so many times as long.",
    "num_gpu_blocks_override": "KV cache blocks, on a CPU too (default: measured).",
    "cpu_kv_cache_gib": "GiB that the cache takes at most on a CPU.",
    "enable_prefix_caching": "Reuse equal prompt beginnings.",
    "max_num_seqs": "Sequences that run at once.",
    "max_num_batched_tokens": "Tokens a step computes at most.",
    "enable_chunked_prefill": "Always on: long prompts are computed in chunks.",
    "scheduling_policy": "fcfs, or priority: by each request's own.",
    "priority_ageing": "Seconds of waiting that make up for one level of priority.",
    "max_logprobs": "Most logprobs a request may ask for; -1: no limit.",
    "generation_config": "auto: sampling defaults of the model; vllm: of SamplingParams.",
    "seed": "Base of the seeds of requests without one.",
    "lm_head_dtype": "model, int8, or auto: int8 under 24 GiB.",
    "embedding_on_host": "Embedding table in CPU memory (default: by the card's size).",
    "enforce_eager": "Never use CUDA graphs.",
    "compile_workers": "Processes that compile a GPU's kernels while the model loads: auto, or a number.",
    "strict": "Refuse a max_model_len that does not fit, instead of lowering it.",
    "skip_tokenizer_init": "No tokenizer: token ids only.",
    "trust_remote_code": "Accept a checkpoint with code of its own.",
    "allow_pickle": "Read .bin weights, which can run code.",
    "structured_outputs_max_bytes": "Longest schema, regex, grammar or list of choices.",
    "structured_outputs_cache_mib": "MiB for compiled ones.",
    "structured_outputs_threads": "Threads that compile them.",
    "structured_outputs_timeout": "Seconds that a request waits for that at most.",
}
PANELS = {"Server": SERVER, "Chat": CHAT, "Engine": ENGINE}
TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "int | str": str,
    "tuple[str, ...]": Optional[list[str]],  # noqa: UP045 - typer on Python 3.10
}
ENVIRONMENT = {"api_key": "QENGINE_API_KEY"}


@dataclass(frozen=True)
class Option:
    """One option: the setting's name, its panel, its help, its Python type and its default.

    number_or_word: its value is a number where it looks like one.
    """

    name: str
    panel: str
    help: str
    type: Any
    default: Any
    number_or_word: bool = False

    def value(self, given: Any) -> Any:
        """What the setting gets."""
        return int(given) if self.number_or_word and isinstance(given, str) and given.isdigit() else given

    @property
    def flag(self) -> str:
        """As on the command line."""
        dashed = self.name.replace("_", "-")
        return f"--{dashed}/--no-{dashed}" if self.default is True else f"--{dashed}"

    def parameter(self) -> inspect.Parameter:
        """As typer reads it."""
        option = typer.Option(
            self.flag,
            help=self.help,
            rich_help_panel=self.panel,
            envvar=ENVIRONMENT.get(self.name),
            show_default=self.default not in (None, (), "", False),
        )
        default = None if self.default == () else self.default
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=Annotated[self.type, option])


def options() -> list[Option]:
    """All options, in the order of the help."""
    kinds = (ServerSettings, ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, StructuredConfig)
    known = {item.name: item for kind in kinds for item in fields(kind)}
    return [
        Option(name, panel, text, _type(annotation), known[name].default, annotation == "int | str")
        for panel, texts in PANELS.items()
        for name, text in texts.items()
        for annotation in [str(known[name].type)]
    ]


def _type(annotation: str) -> Any:
    """The type of an option from a dataclass's annotation; what may be None is left out by leaving the option out."""
    name = annotation.removesuffix(" | None")
    kind = TYPES[name]
    return kind if name == annotation else Optional[kind]  # noqa: UP045

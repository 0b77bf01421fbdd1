"""Options that several commands share; their defaults are those of `qengine.config` and `SamplingParams`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape

from qengine.config import all_defaults

if TYPE_CHECKING:
    from qengine.llm import LLM
    from qengine.sampling_params import SamplingParams

DEFAULTS: dict[str, Any] = all_defaults()
ENGINE = "Engine"
SAMPLING = "Sampling"


def _engine(help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=ENGINE, metavar=metavar)


def sampling(help_text: str, *names: str, metavar: str | None = None) -> Any:
    """An option of the sampling panel; its default is told by its text."""
    return typer.Option(*names, help=help_text, rich_help_panel=SAMPLING, metavar=metavar, show_default=False)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or Hugging Face id.", show_default=False)]
Dtype = Annotated[str, _engine("auto, float32, float16 or bfloat16.", metavar="TYPE")]
Device = Annotated[str, _engine("auto, cpu, cuda or cuda:N.", metavar="NAME")]
# typer reads annotations at run time, on Python 3.10 too: hence Optional.
Quantization = Annotated[
    Optional[str],  # noqa: UP045
    _engine("What the checkpoint must be: awq, gptq, compressed-tensors.", metavar="NAME"),
]
Tokenizer = Annotated[Optional[str], _engine("Folder or id of another tokenizer.", metavar="ID")]  # noqa: UP045
Revision = Annotated[Optional[str], _engine("Branch, tag or commit on the hub.", metavar="NAME")]  # noqa: UP045
TrustRemoteCode = Annotated[bool, _engine("Accept a checkpoint with code of its own.", "--trust-remote-code")]
AllowPickle = Annotated[bool, _engine("Read .bin weights, which can run code.", "--allow-pickle")]
MaxModelLen = Annotated[
    Optional[int],  # noqa: UP045
    _engine("Most tokens of prompt and output (default: the model's limit).", metavar="N"),
]
MaxNumSeqs = Annotated[int, _engine("Sequences that run at once.", metavar="N")]
MaxNumBatchedTokens = Annotated[int, _engine("Tokens a step computes at most.", metavar="N")]
BlockSize = Annotated[int, _engine("Tokens a KV cache block.", metavar="N")]
NumBlocks = Annotated[
    Optional[int],  # noqa: UP045
    _engine("KV cache blocks, on a CPU too (default: measured).", "--num-gpu-blocks-override", metavar="N"),
]
GpuMemory = Annotated[
    float, _engine("Share of the GPU's memory this process may use.", "--gpu-memory-utilization", metavar="X")
]
GpuMemoryLimit = Annotated[
    Optional[float],  # noqa: UP045
    _engine("GiB that the process may take on the GPU, instead of the share.", "--gpu-memory-limit", metavar="GIB"),
]
KvCacheDtype = Annotated[
    str, _engine("auto, the compute type, or on a GPU int8, int4 or fp8.", "--kv-cache-dtype", metavar="TYPE")
]
SwapSpace = Annotated[
    float, _engine("GiB of CPU memory for preempted sequences; 0: computed anew.", "--swap-space", metavar="GIB")
]
LmHeadDtype = Annotated[str, _engine("model, int8, or auto: int8 under 24 GiB.", "--lm-head-dtype", metavar="TYPE")]
EnforceEager = Annotated[bool, _engine("Never use CUDA graphs.", "--enforce-eager")]
NoPrefixCaching = Annotated[bool, _engine("Do not reuse equal prompt beginnings.", "--no-enable-prefix-caching")]
EngineSeed = Annotated[int, _engine("Base of the seeds of requests without one.", "--engine-seed", metavar="N")]

Temperature = Annotated[
    Optional[float],  # noqa: UP045
    sampling("0 takes the most likely token (default: the model's, else 1).", metavar="X"),
]
TopP = Annotated[
    Optional[float],  # noqa: UP045
    sampling("Keep the most likely tokens up to this mass (default: the model's, else 1).", metavar="X"),
]
TopK = Annotated[
    Optional[int],  # noqa: UP045
    sampling("Keep so many tokens, 0 is all (default: the model's, else 0).", metavar="N"),
]
MinP = Annotated[
    Optional[float],  # noqa: UP045
    sampling("Keep tokens this likely beside the most likely (default: the model's, else 0).", metavar="X"),
]
RepetitionPenalty = Annotated[
    Optional[float],  # noqa: UP045
    sampling("Above 1: no repeating of prompt and output (default: the model's, else 1).", metavar="X"),
]
Seed = Annotated[Optional[int], sampling("Fixes the draws (default: by --engine-seed).", metavar="N")]  # noqa: UP045
Stop = Annotated[Optional[list[str]], sampling("End at this text; may be repeated.", metavar="TEXT")]  # noqa: UP045
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


def load_llm(model: str, **settings: Any) -> LLM:
    """Load a model; warnings go to stderr as single lines. transformers' own chatter is turned down."""
    from transformers.utils import logging as transformers_logging

    from qengine.llm import LLM

    transformers_logging.set_verbosity_error()
    console = Console(stderr=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        llm = LLM(model, **settings)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            console.print(f"[yellow]warning:[/] {escape(str(warning.message))}", highlight=False, soft_wrap=True)
    return llm


def sampling_params(llm: LLM, **given: Any) -> SamplingParams:
    """The model's default sampling parameters with the given ones (those not None) in their place."""
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    params.verify()
    return params


def read_text(path: str) -> str:
    """A UTF-8 text file, or stdin for "-". Raises ConfigError."""
    import sys

    from qengine.errors import ConfigError

    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}; convert it first") from error

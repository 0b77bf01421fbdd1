"""qengine: quantized inference for low-VRAM GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qengine.async_llm import AsyncLLM, EngineDeadError, QueueFullError, RequestOutputKind
    from qengine.llm import LLM
    from qengine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
    from qengine.sampling_params import SamplingParams
    from qengine.structured_outputs import StructuredOutputs, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineDeadError",
    "Logprob",
    "QueueFullError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

# Loaded when first asked for: importing qengine alone loads neither torch nor transformers.
_HOMES = {
    "LLM": "qengine.llm",
    "AsyncLLM": "qengine.async_llm",
    "EngineDeadError": "qengine.async_llm",
    "QueueFullError": "qengine.async_llm",
    "RequestOutputKind": "qengine.async_llm",
    "SamplingParams": "qengine.sampling_params",
    "StructuredOutputs": "qengine.structured_outputs",
    "StructuredOutputsParams": "qengine.structured_outputs",
    "CompletionOutput": "qengine.outputs",
    "Logprob": "qengine.outputs",
    "RequestOutput": "qengine.outputs",
    "StreamDelta": "qengine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qengine' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

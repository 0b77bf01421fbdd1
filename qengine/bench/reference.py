"""What vLLM 0.25.1 did with the same loads (Marlin, FlashAttention 3, compiled graphs), to print beside ours.

One H200, 15 GiB, random AWQ weights in groups of 128, float16, greedy, no prefix cache; output tokens a second, tokens
of cache, milliseconds, seconds. Measured with bench.py of the same loads; start-up is the range of its runs.
"""

from __future__ import annotations

from typing import Any

ENGINE = "vLLM 0.25.1, H200, 15 GiB"

VLLM_H200: dict[str, dict[str, dict[str, Any]]] = {
    "llama-2-7b": {
        "float16": {"latency": 262, "streams": 4913, "mixed": 3242, "cache_tokens": 19632, "ttft_ms": 45},
        "int8": {"latency": 267, "streams": 3468, "mixed": 2192, "cache_tokens": 38080, "ttft_ms": 45},
    },
    "qwen2.5-7b": {
        "float16": {"latency": 261, "streams": 6413, "mixed": 9036, "cache_tokens": 136272, "ttft_ms": 45},
    },
}
STARTUP_S = (66, 83)


def reference(model: str, card: str | None, cache_dtype: str) -> dict[str, Any] | None:
    """vLLM's figures for the same model, card and kind of cache; None if there are none to compare with."""
    if card is None or "H200" not in card:
        return None
    name = model.lower().replace("random:", "")
    found = next((figures for shape, figures in VLLM_H200.items() if shape in name), None)
    figures = (found or {}).get(cache_dtype)
    return None if figures is None else {"engine": ENGINE, "startup_s": STARTUP_S, **figures}

"""Perplexity of a decoder on a text's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qengine.errors import QEngineError, RequestError
from qengine.layers.attention import DenseContext
from qengine.models import Decoder

LOGIT_ROWS = 128
"""Positions whose logits are held at once."""


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(nll). nll: mean negative log-likelihood (nats) of the scored tokens. tokens: how many."""

    perplexity: float
    nll: float
    tokens: int
    windows: int
    seq_len: int


@torch.inference_mode()
def perplexity(
    decoder: Decoder,
    token_ids: Sequence[int],
    seq_len: int,
    *,
    max_windows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score `token_ids` in windows of `seq_len` tokens that do not overlap; a shorter rest at the end is left out.

    Each window stands alone: its first token is context only, the other seq_len - 1 are scored, each given all tokens
    before it in the window. One window is computed at a time and its logits 128 positions at a time; the sums are
    float64. progress(done, total) is called after each window. Raises RequestError if there is no whole window.
    """
    count = check_windows(len(token_ids), seq_len)
    if seq_len > decoder.spec.max_position:
        limit = decoder.spec.max_position
        raise RequestError(f"seq_len={seq_len} is more than the model's {limit} positions; lower it")
    if max_windows is not None and max_windows < 1:
        raise RequestError(f"max_windows={max_windows} scores nothing; give at least 1")
    wrong = [token for token in token_ids if not 0 <= token < decoder.spec.vocab_size]
    if wrong:
        size = decoder.spec.vocab_size
        raise RequestError(f"token id {wrong[0]} is outside the model's vocabulary of {size}; use its own tokenizer")
    count = count if max_windows is None else min(count, max_windows)
    total = 0.0
    for index in range(count):
        window = torch.tensor(token_ids[index * seq_len : (index + 1) * seq_len], device=decoder.device)
        total += _window_nll(decoder, window)
        if progress is not None:
            progress(index + 1, count)
    scored = count * (seq_len - 1)
    nll = total / scored
    if not math.isfinite(nll):
        raise QEngineError(
            f"the model gave a loss of {nll} (logits of inf or nan); the weights or the dtype are at fault: try "
            "float32, and check the checkpoint with `qengine inspect`"
        )
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, nll, scored, count, seq_len)


def check_windows(num_tokens: int, seq_len: int) -> int:
    """Whole windows in a text of `num_tokens` tokens. Raises RequestError if there is none."""
    if seq_len < 2:
        raise RequestError(f"seq_len={seq_len} scores nothing; give at least 2")
    if num_tokens < seq_len:
        raise RequestError(
            f"the text has {num_tokens} tokens, less than one window of seq_len={seq_len}; give a longer text or "
            "lower seq_len"
        )
    return num_tokens // seq_len


def _window_nll(decoder: Decoder, window: torch.Tensor) -> float:
    """Sum over tokens 1.. of `window` (int64 [L]) of -log p(token | tokens before)."""
    length = window.shape[0]
    positions = torch.arange(length, device=window.device)
    hidden = decoder.forward(window, positions, DenseContext(1, length))
    total = torch.zeros((), dtype=torch.float64, device=window.device)
    for start in range(0, length - 1, LOGIT_ROWS):
        end = min(start + LOGIT_ROWS, length - 1)
        logprobs = decoder.logits(hidden[start:end]).log_softmax(dim=-1)
        total -= logprobs.gather(1, window[start + 1 : end + 1, None]).double().sum()
    return float(total)

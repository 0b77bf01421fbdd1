"""How the next token is chosen and when a sequence ends: one request's parameters, with their defaults and checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from qengine.errors import RequestError
from qengine.structured_outputs import StructuredOutputs

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token."""
MAX_N = 16384
"""Most sequences of a request, as in vLLM."""


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """`value`, a Python or NumPy number, as a Python one."""
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        upper = "inf)" if high == math.inf else f"{high:g}]"
        raise RequestError(f"{name}={value!r} is not allowed; give a number in {bracket}{low:g}, {upper}")
    return value if isinstance(value, (int, float)) else float(value)


def _integer(name: str, value: Any, low: int, allowed: str) -> int:
    """`value`, a Python or NumPy integer, as a Python one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise RequestError(f"{name}={value!r} is not allowed; give {allowed}")
    return int(value)


def _ids(name: str, value: Any) -> list[int]:
    """`value` as a list of token ids of 0 or more."""
    if value is None:
        return []
    items = [value] if isinstance(value, Integral) else value
    if isinstance(items, (str, bytes)) or not hasattr(items, "__iter__"):
        raise RequestError(f"{name}={value!r} is not allowed; give a list of token ids")
    ids = list(items)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, Integral) or item < 0:
            raise RequestError(f"{name} has {item!r}; give a list of token ids, whole numbers of 0 or more")
    return [int(item) for item in ids]


def _strings(name: str, value: Any) -> list[str]:
    if value is None or value == "":
        return []
    if not isinstance(value, (str, Iterable)):
        raise RequestError(f"{name}={value!r} is not allowed; give a string, or a list of strings")
    items = [value] if isinstance(value, str) else list(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{name} has {item!r}; give a string, or a list of strings that are not empty")
    return items


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; names, defaults and meaning as in vLLM.

    n: sequences returned for the prompt. With temperature 0 they are all the same.
    temperature: divides the logits; 0 (or less than 1e-5) takes the most likely token.
    top_p: keep the most likely tokens whose probabilities reach top_p; 0 keeps the single most likely one.
    top_k: keep the top_k most likely tokens; 0 and -1 keep all, more than the vocabulary is the vocabulary.
    min_p: keep tokens at least min_p times as likely as the most likely one.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or output.
    presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens in the output.
    seed: fixes the draws of this request, whatever runs beside it. None: derived from the engine's seed.
    stop: strings that end a sequence; not part of the text unless include_stop_str_in_output.
    stop_token_ids: token ids that end a sequence. ignore_eos: the model's end tokens do not end it.
    min_tokens: no end token, stop token id or stop string ends the sequence before this many tokens.
    max_tokens: most tokens generated; None is until the context ends.
    logprobs: this many most likely tokens with their logprobs beside the chosen one, each step, of the distribution
    before any of the above changed it; 0 is the chosen one alone, -1 the whole vocabulary. prompt_logprobs: the same
    for the prompt's tokens.
    logit_bias: token id -> number added to its logit, clamped to [-100, 100]. allowed_token_ids: nothing else is
    sampled. bad_words: token sequences of these words (with and without a space before) are never completed.
    detokenize: False leaves text empty. skip_special_tokens, spaces_between_special_tokens: as in tokenizers.
    truncate_prompt_tokens: keep only the last so many prompt tokens; -1 is as many as the context holds.
    structured_outputs: the text is JSON of a schema, matches a regex, ... Its end ends the sequence, before min_tokens
    and with ignore_eos too.

    Raises RequestError for values that are not allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check all values and bring lists into one form. Runs again when a request starts, as fields may change."""
        self._verify_numbers()
        self._verify_lengths()
        self._verify_lists()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed; give True or False")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text, but detokenize=False; use stop_token_ids or detokenize=True")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                got = self.structured_outputs
                raise RequestError(f"structured_outputs={got!r} is not allowed; give StructuredOutputs, or None")
            self.structured_outputs.verify()

    def _verify_numbers(self) -> None:
        self.n = _integer("n", self.n, 1, f"a whole number from 1 to {MAX_N}")
        if self.n > MAX_N:
            raise RequestError(f"n={self.n} is not allowed; give a whole number from 1 to {MAX_N}")
        self.temperature = _number("temperature", self.temperature, 0, math.inf)
        self.top_p = _number("top_p", self.top_p, 0, 1)
        self.min_p = _number("min_p", self.min_p, 0, 1)
        self.top_k = _integer("top_k", self.top_k, -1, "a whole number of at least 1, or 0 or -1 for no limit")
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), "a whole number, or None")
            if self.seed == -1:  # vLLM's "no seed"
                self.seed = None
            elif self.seed >= 2**64:
                raise RequestError(f"seed={self.seed} is not allowed; give a whole number below 2**64")

    def _verify_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, "a whole number of at least 1, or None")
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, "a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                value = _integer(name, getattr(self, name), -1, "a whole number of at least 0, -1 for all, or None")
                setattr(self, name, value)
        if self.truncate_prompt_tokens is not None:
            keep = _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, "at least 1, -1, or None")
            self.truncate_prompt_tokens = keep
            if keep == 0:
                raise RequestError("truncate_prompt_tokens=0 leaves no prompt; give at least 1, -1, or None")

    def _verify_lists(self) -> None:
        self.stop = _strings("stop", self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids=[] leaves nothing to sample; give some ids, or None for all")
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f"logit_bias={value!r} is not allowed; give a mapping from token id to number")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias has the key {key!r}; give token ids") from None
        if isinstance(key, (bool, float)):
            raise RequestError(f"logit_bias has the key {key!r}; give token ids")
        if isinstance(bias, bool) or not isinstance(bias, Real) or not math.isfinite(bias):
            raise RequestError(f"logit_bias[{token}]={bias!r} is not allowed; give a number in [-100, 100]")
        biases[token] = min(100.0, max(-100.0, float(bias)))
    return biases

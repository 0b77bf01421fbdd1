"""What a request may ask of this engine: checks that need the model's numbers, all made before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qengine.errors import RequestError
from qengine.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1
"""Largest absolute priority: differences of time still count beside it."""


@dataclass(frozen=True)
class Limits:
    """The engine's numbers.

    vocab_size: rows of the model's embedding. sample_vocab: ids the tokenizer knows; the rest is padding.
    max_model_len: most tokens of prompt and output. pool_tokens: tokens the whole KV cache holds. eos_ids: all end
    tokens. bos_id: begins an empty prompt, if there is one. max_logprobs: -1 is no limit. switch_length: a sequence
    that grows longer is computed anew, as all its keys change (longrope); None for other models.
    """

    vocab_size: int
    sample_vocab: int
    max_model_len: int
    pool_tokens: int
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    max_logprobs: int = 20
    switch_length: int | None = None

    @property
    def max_len(self) -> int:
        """Most tokens of one sequence: what both the model and the cache allow."""
        return min(self.max_model_len, self.pool_tokens)

    def check_prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The token ids to compute: truncated if asked for, BOS if empty. Raises RequestError."""
        if not token_ids:
            if self.bos_id is None:
                raise RequestError("the prompt is empty and the model has no BOS token; give at least one token")
            return [self.bos_id]
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt token id {token!r} is outside the vocabulary; allowed are 0 to {self.vocab_size - 1}"
                )
        keep = params.truncate_prompt_tokens
        if keep is not None:
            token_ids = token_ids[-(self.max_len - 1 if keep == -1 else keep) :]
        if len(token_ids) < self.max_len:
            return list(token_ids)
        if self.pool_tokens < self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but the whole KV cache holds {self.pool_tokens}, one of "
                "which is left for the output; shorten the prompt or give the cache more blocks"
            )
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len={self.max_model_len} allows at most "
            f"{self.max_model_len - 1} and one of output; shorten the prompt, set truncate_prompt_tokens or raise "
            "max_model_len"
        )

    def check_params(self, params: SamplingParams, *, has_tokenizer: bool) -> None:
        """Raise RequestError for what this model or engine cannot do."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                # An id that only pads the head can never be sampled, so asking for it is a mistake too.
                if not 0 <= token < self.sample_vocab:
                    raise RequestError(
                        f"{name} has token id {token}, which is outside the vocabulary; allowed are 0 to "
                        f"{self.sample_vocab - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            asked, most = getattr(params, name), self.max_logprobs
            if asked is not None and most >= 0 and (asked < 0 or asked > most):
                raise RequestError(
                    f"{name}={asked} is more than max_logprobs={most}; ask for fewer or raise max_logprobs"
                )
        if params.allowed_token_ids is not None and params.min_tokens:
            ends = set(self.banned_ids(params))
            if ends.issuperset(params.allowed_token_ids):
                raise RequestError(
                    f"min_tokens={params.min_tokens} bans all of allowed_token_ids={list(params.allowed_token_ids)}, "
                    "which are end tokens; allow another token or lower min_tokens"
                )
        if not has_tokenizer and (params.stop or params.bad_words):
            raise RequestError("stop and bad_words need a tokenizer; load the model without skip_tokenizer_init")

    def banned_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that must not be sampled before min_tokens."""
        if not params.min_tokens:
            return ()
        ends = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends |= self.eos_ids
        return tuple(sorted(t for t in ends if t < self.sample_vocab))


def check_priority(priority: Any, policy: str) -> None:
    """Raise RequestError for a priority that is no number, or that nothing would look at."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(f"priority={priority!r} is not allowed; give a whole number within +-{MAX_PRIORITY}")
    if priority and policy != "priority":
        raise RequestError(
            f"priority={priority} needs scheduling_policy='priority'; this engine serves requests in the order of "
            f"arrival (scheduling_policy={policy!r})"
        )


def bad_word_ids(tokenizer: Any, words: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it stands at a text's start and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        for text in (word, " " + word.lstrip()):
            try:
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except (UnicodeEncodeError, TypeError) as error:  # see `encode` of engine/prompts.py
                raise RequestError(f"bad_words has {word!r}; give text without lone surrogates") from error
            if ids and max(ids) < vocab_size:
                found[ids] = None
    return tuple(found)


def salt_bytes(salt: Any) -> bytes:
    """A request's cache_salt for the keys of its blocks. Raises RequestError."""
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt={salt!r} is not allowed; give a string")
    try:
        return (salt or "").encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt={salt!r} is not allowed; give text without lone surrogates") from error

"""A request's fields as SamplingParams: the model's defaults where a field is missing or null."""

from __future__ import annotations

from typing import Any

from qengine.sampling_params import SamplingParams
from qengine.server.errors import ApiError
from qengine.server.protocol import SamplingFields
from qengine.server.state import ServerState
from qengine.structured_outputs import StructuredOutputs

MOST_LETTERS = 65536
"""Characters of a request's stop, and of its bad_words, in all."""
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAME_NAME = (
    "n", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "truncate_prompt_tokens", "prompt_logprobs", "logit_bias",
)  # fmt: skip


def sampling_params(
    state: ServerState,
    request: SamplingFields,
    *,
    prompts: int,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    """Checked parameters of each of the request's `prompts` prompts.

    max_tokens, logprobs: as the API means them. structured: what the output must be. Raises ApiError, RequestError.
    """
    _check_counts(state, request, prompts)
    _check_lists(state, request)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for name in FROM_MODEL:
        value = getattr(request, name)
        fields[name] = getattr(state.defaults, name) if value is None else value
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    fields["structured_outputs"] = structured
    if state.llm.tokenizer is None:
        fields["detokenize"] = False
    return SamplingParams(**fields)


def _check_counts(state: ServerState, request: SamplingFields, prompts: int) -> None:
    most = state.settings.max_choices
    if request.count > 0 and request.count * prompts > most:
        raise ApiError(
            f"{prompts} prompts times n={request.count} are more than the {most} completions that a request may have; "
            "send several requests, or raise --max-choices",
            param="n",
        )
    if request.best_of is not None and request.best_of != request.count:
        raise ApiError(
            f"best_of={request.best_of} is not supported beside n={request.count}; ask for n={request.best_of} with "
            "logprobs and choose among them",
            param="best_of",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs come with a whole answer; leave them out or set stream=false", param="stream")
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams; set stream=true or leave them out", param="stream_options")


def _check_lists(state: ServerState, request: SamplingFields) -> None:
    """Lists that each step of the engine looks through, or that it reads between two steps, hold up everybody."""
    for name in ("stop", "bad_words"):
        given = getattr(request, name) or ()
        words = (given,) if isinstance(given, str) else given
        most = state.settings.max_words
        if len(words) > most:
            raise ApiError(
                f"{name} has {len(words)} entries, {most} are allowed; give fewer, or raise --max-words", param=name
            )
        letters = sum(map(len, words))
        if letters > MOST_LETTERS:
            raise ApiError(
                f"{name} has {letters} characters, {MOST_LETTERS} are allowed; give fewer or shorter texts", param=name
            )
    size = state.llm.llm.engine.limits.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids"):
        count = len(getattr(request, name) or ())
        if count > size:
            raise ApiError(f"{name} has {count} ids, more than the vocabulary's {size}; give each once", param=name)


def completion_max_tokens(state: ServerState, given: int | None) -> int | None:
    """Of /v1/completions: the model's default, else 16, as in OpenAI's API."""
    return state.defaults.max_tokens if given is None else given


def chat_max_tokens(state: ServerState, *given: int | None) -> int | None:
    """Of chat: the first that is given, the model's own default, else None: until the context ends."""
    for value in given:
        if value is not None:
            return value
    own = state.defaults.max_tokens
    return None if own == SamplingParams.max_tokens else own

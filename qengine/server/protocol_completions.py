"""Requests of /v1/completions, /generate, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr

from qengine.server.protocol import SamplingFields, Wire
from qengine.server.protocol_chat import ChatMessage

_FIRST = Field(fail_fast=True)
"""The first wrong entry of a list tells that it has another form; all of them would take a second to collect."""
Texts = Annotated[list[StrictStr], _FIRST]
Ids = Annotated[list[StrictInt], _FIRST]
PromptField = StrictStr | Texts | Ids | Annotated[list[Ids], _FIRST]


class CompletionRequest(SamplingFields):
    """Of /v1/completions. max_tokens 0 is allowed with echo: the prompt alone comes back."""

    prompt: PromptField = Field(description="A text, several, token ids, or several lists of token ids.")
    max_tokens: int | None = Field(None, description="Default: the model's, else 16.")
    logprobs: int | None = Field(None, description="Most likely tokens beside each token's own logprob.")
    echo: bool | None = False
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(True, description="Such as BOS, before a text prompt.")


class GenerateRequest(SamplingFields):
    """Of /generate, the short form: a prompt and its parameters."""

    prompt: StrictStr | Ids
    max_tokens: int | None = None
    add_special_tokens: bool | None = True


class TokenizeRequest(Wire):
    """Of /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: StrictStr | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Wire):
    """Of /detokenize."""

    model: str | None = None
    tokens: Ids

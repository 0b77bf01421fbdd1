"""Requests of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from qengine.server.protocol import SamplingFields, Wire


class ChatMessage(Wire):
    """A message. What else it has (name, tool_call_id, ...) goes to the template."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionSpec(Wire):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(Wire):
    """The function that must be called."""

    name: str


class NamedToolChoice(Wire):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingFields):
    """Of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, description="Default: the model's, else until the context ends.")
    max_completion_tokens: int | None = Field(None, description="The same; goes before max_tokens.")
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool | None = Field(False, description="With a final assistant message: put it before the answer.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = Field(False, description="The template writes them, as a rule.")
    chat_template: str | None = Field(None, description="Only with --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = Field(True, description="False leaves the reasoning out of the answer.")

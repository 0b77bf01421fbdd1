"""Messages as the model's chat template takes them, and the prompt that comes of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from qengine.engine.prompts import Prompt, encode, render_chat
from qengine.errors import RequestError
from qengine.server.errors import ApiError
from qengine.server.prompts import off_loop
from qengine.server.protocol_chat import ChatMessage
from qengine.server.state import ServerState

PART = 50
"""What rendering a message or a part of one costs, in characters to be tokenized."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


async def chat_prompt(
    state: ServerState,
    messages: Sequence[ChatMessage],
    *,
    template: str | None,
    template_kwargs: dict[str, Any] | None,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool | None = False,
    cache_salt: str | None = None,
) -> Prompt:
    """The rendered and tokenized conversation. Raises ApiError."""
    if template is not None and not state.settings.trust_request_chat_template:
        raise ApiError(
            "chat_template is not taken from requests; leave it out, or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    tokenizer = state.tokenizer
    options = dict(template_kwargs or {})
    _check_kwargs(options, tokenizer)
    if documents is not None:
        options["documents"] = documents

    def read() -> Prompt:
        conversation = [template_message(message, index) for index, message in enumerate(messages)]
        text = render_chat(
            conversation,
            tokenizer,
            chat_template=template or state.settings.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=options,
        )
        return Prompt(encode(text, tokenizer, add_special_tokens=bool(add_special_tokens)), text, cache_salt)

    try:
        return await off_loop(_size(messages) + (len(str(tools)) if tools else 0), read)
    except RequestError as error:
        raise ApiError(str(error), param="messages") from error


def _size(messages: Sequence[ChatMessage]) -> int:
    """Characters of text that take as long as these messages, be they empty."""
    size = 0
    for message in messages:
        content = message.content
        parts = [content] if isinstance(content, str) else content or []
        size += PART + sum(PART + (len(part) if isinstance(part, str) else len(str(part))) for part in parts)
        size += len(str(message.tool_calls)) if message.tool_calls else 0
    return size


def _check_kwargs(options: dict[str, Any], tokenizer: Any) -> None:
    """Values for the template only: what steers the rendering itself has fields of its own."""
    if not options:
        return
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
    for name in options:
        if name in own:
            raise ApiError(
                f"chat_template_kwargs has {name!r}, which is no value for the template; leave it out",
                param="chat_template_kwargs",
            )


def template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates know it: text content, `developer` as `system`, arguments of calls as objects."""
    made = {name: value for name, value in message.model_dump().items() if value is not None}
    made["role"] = "system" if message.role == "developer" else message.role
    made["content"] = _content(message.content, index)
    if message.tool_calls is not None:
        made["tool_calls"] = [_call(call, index) for call in message.tool_calls]
    return made


def _content(content: Any, index: int) -> str:
    """Text parts, joined by line ends as in vLLM."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type")
        name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise ApiError(
                f"messages[{index}] has a part of type {kind!r}; this model reads text only: give parts of type 'text'",
                param="messages",
            )
        if not isinstance(part.get(name), str):
            raise ApiError(f"messages[{index}] has a {kind} part without {name!r}", param="messages")
        texts.append(part[name])
    return "\n".join(texts)


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool call of an assistant message; OpenAI's arguments are JSON in a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"messages[{index}] has a tool call without a function name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise ApiError(
                f"messages[{index}] has a tool call whose arguments are not JSON: {error}", param="messages"
            ) from error
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}

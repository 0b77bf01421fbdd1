"""What a caller may pass as prompts, brought to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from qengine.errors import RequestError

FORMS = 'a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids, the text they came from (None where ids were given) and its prefix cache salt."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def split_prompts(prompts: Any) -> list[Any]:
    """The single prompts in what a caller passed: one prompt, or a list of them in any mixture of forms."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(f"prompts of type {type(prompts).__name__} are not known; give {FORMS}, or a list of those")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def read_prompt(item: Any, tokenizer: Any) -> Prompt:
    """One prompt in any form. Raises RequestError."""
    if isinstance(item, str):
        return Prompt(encode(item, tokenizer), item)
    if isinstance(item, (list, tuple)):
        return Prompt(_plain_ids(item))
    if not isinstance(item, dict):
        raise RequestError(f"a prompt of type {type(item).__name__} is not known; give {FORMS}")
    unknown = set(item) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise RequestError(f"a prompt has the unknown key {sorted(map(str, unknown))[0]!r}; give {FORMS}")
    text, ids, salt = item.get("prompt"), item.get("prompt_token_ids"), item.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt={text!r} is not a string; token ids go under 'prompt_token_ids'")
    if ids is not None:
        if not isinstance(ids, (list, tuple)):
            raise RequestError(f"prompt_token_ids={ids!r} is not a list of token ids")
        return Prompt(_plain_ids(ids), text, salt)
    if text is None:
        raise RequestError(f"a prompt has neither 'prompt' nor 'prompt_token_ids'; give {FORMS}")
    return Prompt(encode(text, tokenizer), text, salt)


def _plain_ids(ids: Sequence[Any]) -> list[Any]:
    """NumPy's integers as Python's; what is no integer stays, for the check against the vocabulary to name it."""
    return [item if isinstance(item, bool) or not isinstance(item, Integral) else int(item) for item in ids]


def encode(text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of `text`. Raises RequestError without a tokenizer."""
    if tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer, and none was loaded; give token ids instead")
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except (UnicodeEncodeError, TypeError) as error:  # the tokenizers library has a TypeError for lone surrogates
        raise RequestError(f"the prompt is not valid text: {error}; give text without lone surrogates") from error


def split_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) or several, as a list of conversations. Raises RequestError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    conversations = [messages] if isinstance(messages[0], dict) else messages
    for index, conversation in enumerate(conversations):
        if not isinstance(conversation, (list, tuple)):
            raise RequestError(f"conversation {index} is {conversation!r}, not a list of messages")
        for message in conversation:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"conversation {index}: the message {message!r} has no role; "
                    'give messages such as {"role": "user", "content": "Hello"}'
                )
    return [list(conversation) for conversation in conversations]


def render_chat(
    conversation: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The conversation as the model's chat template writes it. Raises RequestError."""
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and none was loaded")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the model has no chat template; pass chat_template=<Jinja text>, or use generate with a prompt you format"
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other; set add_generation_prompt=False"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(conversation),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            tokenize=False,
            **(template_kwargs or {}),
        )
    except Exception as error:  # templates run arbitrary Jinja: any exception is what the template said
        raise RequestError(f"the chat template refused the messages: {error}") from error
    return text

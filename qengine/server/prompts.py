"""The prompts of a request as token ids. Long texts are tokenized in a thread: the event loop serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from qengine.async_llm import LONG_TEXT
from qengine.engine.prompts import Prompt, encode
from qengine.errors import RequestError
from qengine.server.errors import ApiError
from qengine.server.state import ServerState

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread if `size` characters of text are many."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def split(prompt: Any) -> list[str | list[int]]:
    """The single prompts of a request. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError("prompt=[] holds no prompt; give a text, token ids, or a list of those", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


async def read_prompts(
    state: ServerState, prompt: Any, *, add_special_tokens: bool | None, cache_salt: str | None
) -> list[Prompt]:
    """Each prompt's token ids. Raises ApiError, RequestError."""
    special = True if add_special_tokens is None else add_special_tokens
    items = split(prompt)
    if len(items) > state.settings.max_choices:
        raise ApiError(
            f"{len(items)} prompts are more than the {state.settings.max_choices} that a request may have; send "
            "several requests, or raise --max-choices",
            param="prompt",
        )
    size = sum(len(item) for item in items if isinstance(item, str))
    tokenizer = state.llm.tokenizer

    def read() -> list[Prompt]:
        return [_read(item, tokenizer, special, cache_salt) for item in items]

    try:
        return await off_loop(size, read)
    except RequestError as error:
        raise ApiError(str(error), param="prompt") from error


def _read(item: str | list[int], tokenizer: Any, special: bool, salt: str | None) -> Prompt:
    if isinstance(item, str):
        return Prompt(encode(item, tokenizer, add_special_tokens=special), item, salt)
    return Prompt(item, None, salt)


def prompt_text(state: ServerState, prompt: Prompt, token_ids: list[int]) -> str:
    """For echo: the text as it was sent, or that of the token ids."""
    if prompt.text is not None:
        return prompt.text
    text: str = state.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    return text

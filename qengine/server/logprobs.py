"""Logprobs in the forms of both APIs, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qengine.outputs import Logprob
from qengine.server.token_text import TokenTexts

Entry = dict[int, Logprob]
LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM's number for it."""


def finite(value: float) -> float:
    """As JSON can say it."""
    return max(value, LEAST_LOGPROB)


def _name(texts: TokenTexts, token: int, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else texts.text(token)


def completion_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    asked: int,
    *,
    offset: int = 0,
    as_ids: bool = False,
) -> dict[str, list[Any]]:
    """Of /v1/completions: tokens, token_logprobs, top_logprobs, text_offset.

    entries: one a token; None for a prompt's first. asked: how many of the most likely are shown beside each, where 0
    shows the token alone. offset: characters before the first token.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, entry in zip(token_ids, entries, strict=True):
        text = _name(texts, token, as_ids)
        result["text_offset"].append(offset)
        result["tokens"].append(text)
        offset += len(text)
        result["token_logprobs"].append(None if entry is None else finite(entry[token].logprob))
        top = None
        if entry is not None:
            shown = _most_likely(entry, token, asked)
            top = {_name(texts, other, as_ids): finite(item.logprob) for other, item in shown}
        result["top_logprobs"].append(top)
    return result


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[Entry], asked: int, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """Of chat: for each token its logprob, its bytes and the `asked` most likely ones."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        one = _chat_item(texts, token, entry[token], as_ids)
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)
        chosen = [pair for pair in ranked if asked < 0 or (pair[1].rank or 0) <= asked]
        one["top_logprobs"] = [_chat_item(texts, other, item, as_ids) for other, item in chosen]
        content.append(one)
    return {"content": content}


def _chat_item(texts: TokenTexts, token: int, item: Logprob, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(texts, token, as_ids), "logprob": finite(item.logprob), "bytes": texts.bytes(token)}


def _most_likely(entry: Entry, token: int, asked: int) -> list[tuple[int, Logprob]]:
    """The `asked` most likely, and the token itself if it is not among them."""
    ranked = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)
    return [pair for pair in ranked if asked < 0 or (pair[1].rank or 0) <= asked or pair[0] == token]


def prompt_logprobs(texts: TokenTexts, entries: Sequence[Entry | None] | None) -> list[Any] | None:
    """vLLM's extension: for each prompt token a mapping from token id, as text, to logprob, rank and text."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": finite(item.logprob), "rank": item.rank, "decoded_token": texts.text(token)}
            for token, item in entry.items()
        }
        for entry in entries
    ]

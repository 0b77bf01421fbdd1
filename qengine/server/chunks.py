"""Events of a stream, put together from parts that are made once a request: little work a token."""

from __future__ import annotations

import json
from typing import Any

quote = json.encoder.encode_basestring_ascii
"""A JSON string; in C, where Python has it."""


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


class Chunks:
    """Chunks of one answer.

    kind: OpenAI's `object`. usage: "null" in each chunk before the usage's own, as OpenAI does where it was asked for.
    """

    def __init__(self, answer_id: str, kind: str, created: int, model: str, *, include_usage: bool) -> None:
        head = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = "data: " + compact(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def text(self, index: int, text: str) -> str:
        """Text of /v1/completions and nothing else."""
        return (
            f'{self._head}{{"index":{index},"text":{quote(text)},"logprobs":null,"finish_reason":null,'
            f'"stop_reason":null}}{self._tail}'
        )

    def content(self, index: int, text: str) -> str:
        """Text of an answer of chat and nothing else."""
        return (
            f'{self._head}{{"index":{index},"delta":{{"content":{quote(text)}}},"logprobs":null,'
            f'"finish_reason":null}}{self._tail}'
        )

    def choice(self, choice: dict[str, Any], usage: dict[str, Any] | None = None, **more: Any) -> str:
        """Any choice. usage: so far, where every chunk has it. more: fields beside the choices."""
        tail = self._tail if usage is None else f'],"usage":{compact(usage)}}}\n\n'
        if more:
            tail = "]," + compact(more)[1:-1] + tail[1:]
        return f"{self._head}{compact(choice)}{tail}"

    def usage(self, usage: dict[str, Any]) -> str:
        """The last chunk: no choices, all tokens."""
        return f'{self._head}],"usage":{compact(usage)}}}\n\n'

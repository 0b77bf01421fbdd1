"""Pieces of xgrammar's structural tags that the forms of tool calls are made of."""

from __future__ import annotations

import json
from typing import Any

Format = dict[str, Any]


def json_call(before: str, name: str, key: str, schema: Format, after: str) -> Format:
    """A tag: `before`, an object with the name and the arguments under `key`, `after`."""
    quoted = json.dumps(name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{before}{{"name": {quoted}, "{key}": ',
        "content": schema,
        "end": f"}}{after}",
    }


def some_of(tags: list[Format], separator: str, *, parallel: bool) -> Format:
    """One of the tags, or several with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }

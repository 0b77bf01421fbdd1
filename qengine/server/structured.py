"""What a request says about the form of its output, as StructuredOutputs."""

from __future__ import annotations

import json
from typing import Any

from qengine.server.errors import ApiError
from qengine.server.protocol import SamplingFields
from qengine.structured_outputs import KINDS, StructuredOutputs

FLAGS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """The one constraint that the request gives in any of the forms, or None.

    Raises ApiError for two at once and for unknown ones, RequestError for values that are not allowed.
    """
    named, flags = _named(request)
    given = [*_response_format(request).items(), *named.items(), *_guided(request).items()]
    if not given:
        return None
    if len(given) > 1:
        raise ApiError(
            f"the output is constrained {len(given)} times ({', '.join(name for name, _ in given)}); give one of "
            "response_format, structured_outputs and guided_*",
            param="response_format",
        )
    [(name, value)] = given
    return StructuredOutputs(**{name: value}, **flags)


def _response_format(request: SamplingFields) -> dict[str, Any]:
    form = request.response_format
    if form is None or form.get("type") == "text":
        return {}
    if form.get("type") == "json_object":
        return {"json_object": True}
    if form.get("type") == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema", inner.get("json_schema")) if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise ApiError(
                'response_format has no schema; give {"type": "json_schema", "json_schema": {"name": ..., '
                '"schema": {...}}}',
                param="response_format",
            )
        return {"json": schema if isinstance(schema, dict) else json.dumps(schema)}
    if form.get("type") == "structural_tag":
        return {
            "structural_tag": {key: value for key, value in form.items() if key != "type"} | {"type": "structural_tag"}
        }
    raise ApiError(
        f"response_format has the type {form.get('type')!r}; give 'text', 'json_object' or 'json_schema'",
        param="response_format",
    )


def _named(request: SamplingFields) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what structured_outputs asks for, how)."""
    given = {name: value for name, value in (request.structured_outputs or {}).items() if value is not None}
    for name in given:
        if name not in KINDS and name not in FLAGS:
            raise ApiError(f"structured_outputs has {name!r}; give one of {', '.join(KINDS)}", param=name)
    if request.structured_outputs is not None and not any(name in KINDS for name in given):
        raise ApiError(
            f"structured_outputs asks for nothing; give one of {', '.join(KINDS)}", param="structured_outputs"
        )
    flags = {name: given.pop(name) for name in FLAGS if name in given}
    return given, flags


def _guided(request: SamplingFields) -> dict[str, Any]:
    given = {
        "json": request.guided_json, "regex": request.guided_regex, "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }  # fmt: skip
    if isinstance(given["json"], bool):
        raise ApiError(
            f"guided_json={str(given['json']).lower()} is no schema; give a JSON schema", param="guided_json"
        )
    return {name: value for name, value in given.items() if value is not None}

"""Making the model call a tool: a grammar of its own form of calls, so that the parser reads what comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qengine.errors import RequestError
from qengine.server.tools.base import Format, ToolParser
from qengine.structured_outputs import StructuredOutputs


def forced_calls(
    parser: ToolParser, functions: Sequence[dict[str, Any]], name: str | None = None, *, parallel: bool = True
) -> StructuredOutputs:
    """What the output must be where tool_choice is "required", or names a function: calls, and nothing beside them.

    functions: OpenAI's, each {"name": ..., "parameters": JSON schema or none}. name: the one to call, once. parallel:
    several calls may be made. Raises RequestError for a name that is not among the functions, or without any.
    """
    if not functions:
        raise RequestError("tool_choice asks for a call, but there are no tools; give tools, or tool_choice='none'")
    if name is not None:
        known = [function["name"] for function in functions]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools: {', '.join(known)}")
    wanted = [(function["name"], _schema(function.get("parameters"))) for function in functions]
    form = parser.forced(wanted, parallel=parallel and name is None)
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})


def _schema(parameters: Any) -> Format:
    """The arguments: always an object, which is what the forms of calls hold."""
    if not parameters:
        parameters = {"type": "object"}
    if not isinstance(parameters, dict):
        raise RequestError(f"a tool's parameters are {parameters!r}; give a JSON schema of type 'object'")
    if "type" not in parameters and "$ref" not in parameters:
        parameters = {"type": "object", **parameters}
    return {"type": "json_schema", "json_schema": parameters}

"""Tool calls: how models write them, read back from text, whole or as it comes, and how a model is made to write one.

parser = tool_parser("hermes")
parser.parse('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>').calls
stream = parser.stream(); stream.feed(text) ...; stream.finish()
forced_calls(parser, functions, parallel=True)      a StructuredOutputs that the model cannot leave
"""

from __future__ import annotations

from qengine.errors import ConfigError
from qengine.server.tools.base import ToolParser
from qengine.server.tools.forced import forced_calls
from qengine.server.tools.hermes import HermesParser
from qengine.server.tools.llama3 import Llama3Parser
from qengine.server.tools.mistral import MistralParser
from qengine.server.tools.parts import CallArguments, CallStart, Content, ParsedTools, Part, ToolCall

__all__ = [
    "TOOL_PARSERS",
    "CallArguments",
    "CallStart",
    "Content",
    "ParsedTools",
    "Part",
    "ToolCall",
    "ToolParser",
    "forced_calls",
    "tool_parser",
]

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def tool_parser(name: str) -> ToolParser:
    """The parser of this name. Raises ConfigError."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser={name!r} is not known; give one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]()

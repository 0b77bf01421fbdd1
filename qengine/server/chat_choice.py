"""The parts of an answer of chat: reasoning, content and tool calls, whole or as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qengine.server.errors import ApiError
from qengine.server.protocol_chat import ChatRequest, NamedToolChoice, Tool
from qengine.server.reasoning import ReasoningForm, ReasoningSplitter, after_reasoning, reasoning_form
from qengine.server.settings import ServerSettings
from qengine.server.tools import CallStart, Content, Part, ToolParser, forced_calls, tool_parser
from qengine.structured_outputs import StructuredOutputs

FORM_OF_FORCED_CALLS = "hermes"
"""Where no tool_call_parser is set: the model writes what it is forced to."""


@dataclass(frozen=True)
class ChatForm:
    """What a request's answer consists of.

    parser: of tool calls, None where the answer has none. named: one function must be called, and its call is the whole
    answer, which ends with "stop". parallel: several calls may come. reasoning: how it is written; None: it is not
    split off. inside: see ReasoningSplitter. hidden: the reasoning is left out.
    """

    parser: ToolParser | None = None
    named: bool = False
    parallel: bool = True
    reasoning: ReasoningForm | None = None
    inside: bool | None = None
    hidden: bool = False

    @property
    def plain(self) -> bool:
        """Content alone."""
        return self.parser is None and self.reasoning is None

    def reader(self, *, eager: bool = True) -> ChoiceReader:
        """Of one choice. eager: arguments of calls as they come; else whole, once their call is complete."""
        return ChoiceReader(self, eager=eager)

    def message(self, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """(the message without its role, the answer's finish_reason) of a whole text."""
        if self.plain:
            return {"content": text}, finish_reason
        reader = self.reader(eager=False)
        message: dict[str, Any] = {"content": None}
        for delta in reader.feed(text, finish_reason or "stop"):
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                _add_call(message.setdefault("tool_calls", []), call)
        if message["content"] is None and "tool_calls" not in message and "reasoning" not in message:
            message["content"] = ""
        return message, None if finish_reason is None else reader.reason(finish_reason)


class ChoiceReader:
    """Text of one choice as it comes, as deltas."""

    def __init__(self, form: ChatForm, *, eager: bool) -> None:
        self._form = form
        self._called = False
        self._tools = None if form.parser is None else form.parser.stream(eager=eager)
        self._splitter = None if form.reasoning is None else ReasoningSplitter(form.reasoning, inside=form.inside)

    def feed(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """Deltas of OpenAI's form. finish_reason: set with a choice's last text."""
        deltas: list[dict[str, Any]] = []
        if self._splitter is not None:
            reasons, text = self._splitter.feed(text)
            if finish_reason is not None:
                more_reasons, more = self._splitter.finish()
                reasons, text = reasons + more_reasons, text + more
            if reasons and not self._form.hidden:
                deltas.append({"reasoning_content": reasons, "reasoning": reasons})
        if self._tools is None:
            return [*deltas, {"content": text}] if text else deltas
        parts = self._tools.feed(text) if text else []
        if finish_reason is not None:
            parts += self._tools.finish()
        return deltas + [self._delta(part) for part in parts if self._allowed(part)]

    def reason(self, finish_reason: str) -> str:
        """The answer's finish_reason."""
        return "tool_calls" if self._called and finish_reason == "stop" and not self._form.named else finish_reason

    def _allowed(self, part: Part) -> bool:
        return isinstance(part, Content) or self._form.parallel or part.index == 0

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, CallStart):
            self._called = True
            function = {"name": part.name, "arguments": ""}
            return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Merge a piece of a call into the whole ones, which have no index."""
    if "id" in delta:
        calls.append({name: value for name, value in delta.items() if name != "index"})
    else:
        calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def template_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """What the template is told of the tools: nothing, if none may be called."""
    if not request.tools or request.tool_choice == "none":
        return None
    return [{"type": tool.type, "function": _function(tool)} for tool in request.tools]


def chat_form(
    settings: ServerSettings, request: ChatRequest, prompt: str, wanted: StructuredOutputs | None
) -> tuple[ChatForm, StructuredOutputs | None]:
    """(how the answer is read, what the output must be).

    prompt: as rendered; its end tells whether the answer begins within the reasoning. wanted: what the request demands
    of the content, if anything. Raises ApiError for what the server was not started for, RequestError.
    """
    parser, forced = _tools(settings, request)
    reasoning = None if settings.reasoning_parser is None else reasoning_form(settings.reasoning_parser)
    inside = None if reasoning is None else _inside(reasoning, prompt)
    if forced is not None:
        wanted = forced
    if wanted is not None and reasoning is not None and inside is not False:
        wanted = after_reasoning(wanted, reasoning, inside=inside)
    form = ChatForm(
        parser=parser,
        named=isinstance(request.tool_choice, NamedToolChoice),
        parallel=request.parallel_tool_calls is not False,
        reasoning=reasoning,
        inside=inside,
        hidden=request.include_reasoning is False,
    )
    return form, wanted


def _tools(settings: ServerSettings, request: ChatRequest) -> tuple[ToolParser | None, StructuredOutputs | None]:
    """(the parser of the answer's calls, the calls that must be made)."""
    choice = request.tool_choice
    if choice == "none" or (not request.tools and choice in (None, "auto")):
        return None, None
    if choice in (None, "auto"):
        if not settings.enable_auto_tool_choice or settings.tool_call_parser is None:
            raise ApiError(
                "tools whose use the model decides on need a server started with --enable-auto-tool-choice and "
                "--tool-call-parser; start it so, or send tool_choice 'none', 'required' or a function",
                param="tool_choice",
            )
        return tool_parser(settings.tool_call_parser), None
    parser = tool_parser(settings.tool_call_parser or FORM_OF_FORCED_CALLS)
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    functions = [_function(tool) for tool in request.tools or ()]
    return parser, forced_calls(parser, functions, name, parallel=request.parallel_tool_calls is not False)


def _function(tool: Tool) -> dict[str, Any]:
    return {name: value for name, value in tool.function.model_dump().items() if value is not None}


def _inside(form: ReasoningForm, prompt: str) -> bool | None:
    end = prompt.rstrip()
    if end.endswith(form.start):
        return True
    return False if end.endswith(form.end) else None

"""The forms of tool calls, read at once and cut anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.errors import ConfigError
from qengine.server.tools import TOOL_PARSERS, CallArguments, CallStart, Content, ToolCall, tool_parser
from qengine.server.tools.json_scanner import JsonScanner
from qengine.server.tools.parts import merged

ONE = '{"name": "f", "arguments": {"a": [1, {"b": null}], "č": "\\"}\\u00e9 {"}}'
ONE_ARGS = '{"a": [1, {"b": null}], "č": "\\"}\\u00e9 {"}'
LLAMA = ONE.replace("arguments", "parameters")
OTHER = '{"arguments": {}, "name": "g.h-1"}'
HERMES = f"<tool_call>\n{ONE}\n</tool_call>"

# (parser, text, content, calls)
CASES = [
    ("hermes", "Just text < with <tags> and {braces}.\n", "Just text < with <tags> and {braces}.\n", []),
    ("hermes", "", None, []),
    ("hermes", HERMES, None, [("f", ONE_ARGS)]),
    ("qwen", f"Let me look.\n\n{HERMES}", "Let me look.", [("f", ONE_ARGS)]),
    (
        "hermes",
        f"{HERMES}\n<tool_call>{OTHER}</tool_call>\n\ndone ",
        "done ",
        [("f", ONE_ARGS), ("g.h-1", "{}")],
    ),
    ("hermes", f"<tool_call>{OTHER}", None, [("g.h-1", "{}")]),
    ("hermes", f"<tool_call>{OTHER}<tool_call>{OTHER}</tool_call>", None, [("g.h-1", "{}")] * 2),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
    ("hermes", '<tool_call>{"type":"function","name":"f","arguments":"{\\"a\\": 1}"}', None, [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id":5,"name":"f","arguments":{"a":-1.5e3}}', None, [("f", '{"a":-1.5e3}')]),
    # malformed: what was written is the content
    ("hermes", "a <tool_call>\nno JSON</tool_call>", "a <tool_call>\nno JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>', []),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    ("hermes", '<tool_call>{"function": "f"}</tool_call>', '<tool_call>{"function": "f"}</tool_call>', []),
    ("hermes", '<tool_call>["f"]</tool_call> x', '<tool_call>["f"]</tool_call> x', []),
    ("hermes", f"<tool_call>{{,}}</tool_call>{HERMES}", "<tool_call>{,}</tool_call>", [("f", ONE_ARGS)]),
    ("hermes", 'so <tool_call>{"name": "f', 'so <tool_call>{"name": "f', []),
    ("hermes", "so <tool_", "so <tool_", []),
    ("hermes", "so <tool_call>", "so <tool_call>", []),
    ("llama3_json", LLAMA, None, [("f", ONE_ARGS)]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {OTHER}", None, [("f", ONE_ARGS), ("g.h-1", "{}")]),
    ("llama3_json", f"{OTHER}\n{OTHER}\nand more", "and more", [("g.h-1", "{}")] * 2),
    ("llama3_json", f"I will call:\n{OTHER}", "I will call:", [("g.h-1", "{}")]),
    ("llama3_json", f"not here: {OTHER}", f"not here: {OTHER}", []),
    ("llama3_json", f"a <\n{OTHER}", "a <", [("g.h-1", "{}")]),
    ("llama3_json", f"<|py\n {OTHER}<|python_tag|>{OTHER}", "<|py", [("g.h-1", "{}")] * 2),
    ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
    ("llama3_json", '{"name": "Bob", "age": 3}\n', '{"name": "Bob", "age": 3}\n', []),
    ("llama3_json", "  hello\n {x}", "  hello\n {x}", []),
    ("mistral", f"[TOOL_CALLS][{ONE}, {OTHER}]", None, [("f", ONE_ARGS), ("g.h-1", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{OTHER}] text", "text", [("g.h-1", "{}")]),
    ("mistral", f"Well, [TOOL_CALLS]{OTHER}", "Well,", [("g.h-1", "{}")]),
    ("mistral", f" [ {OTHER} ]", None, [("g.h-1", "{}")]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ONE_ARGS}", None, [("f", ONE_ARGS)]),
    ("mistral", f"[TOOL_CALLS]f{ONE_ARGS}[TOOL_CALLS]g [ARGS] {{}}", None, [("f", ONE_ARGS), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}', None, [("f", '{"x": 1}')]),
    ("mistral", "[1, 2] are [TOOL", "[1, 2] are [TOOL", []),
    ("mistral", "[TOOL_CALLS]f[ARGX]{}", "[TOOL_CALLS]f[ARGX]{}", []),
    ("mistral", "[TOOL_CALLS]f g{}", "[TOOL_CALLS]f g{}", []),
    ("mistral", '[{"a": 1}]', '[{"a": 1}]', []),
    ("mistral", "[TOOL_CALLS][nothing]", "[TOOL_CALLS][nothing]", []),
]


def plain(parsed):
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls]


def streamed(name, pieces, eager=True):
    stream = tool_parser(name).stream(eager=eager)
    return merged([part for piece in pieces for part in stream.feed(piece)] + stream.finish())


def check_order(parts):
    """A call begins once, before its arguments, and calls come one after the other."""
    begun = -1
    for part in parts:
        if isinstance(part, CallStart):
            assert part.index == begun + 1
            begun = part.index
        elif isinstance(part, CallArguments):
            assert part.index == begun
            assert part.text
        else:
            assert isinstance(part, Content)
            assert part.text


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_read_at_once_and_cut_anywhere(name, text, content, calls):
    assert plain(tool_parser(name).parse(text)) == (content, calls)
    for cut in range(len(text) + 1):
        for eager in (False, True):
            assert plain(streamed(name, [text[:cut], text[cut:]], eager)) == (content, calls), cut
    stream = tool_parser(name).stream()
    parts = [part for char in text for part in stream.feed(char)] + stream.finish()
    check_order(parts)
    assert plain(merged(parts)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "more": 2}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 01}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a" 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": nul}'),
    ],
)
def test_malformed_arguments_are_content_at_once_and_stay_begun_in_a_stream(name, text):
    assert plain(tool_parser(name).parse(text)) == (text, [])
    whole = streamed(name, [text])
    assert [call.name for call in whole.calls] == ["f"]
    assert whole.calls[0].arguments
    assert whole.calls[0].arguments in text
    for eager in (False, True):
        expected = plain(streamed(name, [text], eager))
        for cut in range(len(text)):
            assert plain(streamed(name, [text[:cut], text[cut:]], eager)) == expected


def test_arguments_come_while_they_are_written_and_content_before_the_call():
    stream = tool_parser("hermes").stream()
    assert stream.feed("Hi <b> there") == [Content("Hi <b> there")]
    assert stream.feed(" <tool") == []
    [start] = stream.feed('_call>{"name": "f", "arguments": {')[:1]
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert stream.feed('"a": 1') == [CallArguments(0, '"a": 1')]
    assert stream.feed("}}</tool_call>") == [CallArguments(0, "}")]
    assert stream.finish() == []


def test_ids_have_the_form_that_templates_expect_and_are_unique():
    calls = tool_parser("hermes").parse(HERMES * 3).calls
    assert all(call.id.startswith("call_") and call.id[5:].isalnum() for call in calls)
    assert len({call.id for call in calls}) == 3
    short = tool_parser("mistral").parse(f"[TOOL_CALLS][{ONE},{ONE}]").calls
    assert all(len(call.id) == 9 and call.id.isalnum() for call in short)
    assert short[0].id != short[1].id
    assert isinstance(short[0], ToolCall)


def test_names_of_parsers():
    assert set(TOOL_PARSERS) == {"hermes", "qwen", "llama3_json", "mistral"}
    assert tool_parser("mistral").keeps_special_tokens
    assert not tool_parser("qwen").keeps_special_tokens
    with pytest.raises(ConfigError, match=r"tool_call_parser='pythonic'.*hermes"):
        tool_parser("pythonic")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)


def scan(text):
    """How many characters the scanner takes; -1 if it is not complete then."""
    scanner = JsonScanner()
    for at, char in enumerate(text):
        if not scanner.feed(char):
            return at
    return len(text) if scanner.done else -1


@settings(max_examples=60, deadline=None)
@given(OBJECTS | st.lists(JSON, max_size=3), st.sampled_from([None, 2]), st.booleans())
def test_the_scanner_takes_all_json(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert scan(text) == len(text)
    assert scan(text[:-1]) == -1
    assert scan(text + "x") == len(text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='{}[]",:\\u1-.eE +tfnrualse\n0a', max_size=14).map(lambda s: ("{" + s).rstrip()))
def test_the_scanner_takes_nothing_else(text):
    def valid(part):
        try:
            json.loads(part)
        except ValueError:
            return False
        return True

    taken = scan(text)
    assert valid(text) == (taken == len(text))
    if taken >= 0:
        assert valid(text[:taken]) or not any(valid(text[:n]) for n in range(taken, len(text) + 1))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3_json", "mistral"]),
    st.lists(st.tuples(st.text("abc_-.", min_size=1, max_size=5), OBJECTS), min_size=1, max_size=3),
    st.text(alphabet="ab <>.,\n", max_size=10),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_what_models_write_is_read_back_in_any_pieces(name, calls, before, sizes):
    before = before.strip()
    texts = [json.dumps({"name": n, "parameters" if name == "llama3_json" else "arguments": a}) for n, a in calls]
    if name == "hermes":
        text = before + "\n" + "\n".join(f"<tool_call>\n{t}\n</tool_call>" for t in texts)
    elif name == "llama3_json":
        text = before + "\n" + "; ".join(texts)
    else:
        text = before + "[TOOL_CALLS][" + ", ".join(texts) + "]"
    pieces, at, n = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[n % len(sizes)]])
        at, n = at + len(pieces[-1]), n + 1
    for parsed in (tool_parser(name).parse(text), streamed(name, pieces), streamed(name, pieces, eager=False)):
        assert parsed.content == (before or None)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls

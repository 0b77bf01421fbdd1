"""Reasoning split off answers, and demands on what comes after it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine import StructuredOutputs
from qengine.errors import ConfigError
from qengine.server.reasoning import (
    REASONING_PARSERS,
    ReasoningForm,
    ReasoningSplitter,
    after_reasoning,
    reasoning_form,
    split_reasoning,
)

QWEN, DEEPSEEK = REASONING_PARSERS["qwen3"], REASONING_PARSERS["deepseek_r1"]
CASES = [
    # (form, inside, text, reasoning, content)
    (QWEN, None, "<think>\nIt is <b>.\n</think>\n\nYes.", "It is <b>.", "Yes."),
    (QWEN, None, "Yes, <think> is a tag.", None, "Yes, <think> is a tag."),
    (QWEN, None, "\n <think>a</think>b", "a", "b"),
    (QWEN, None, "  plain", None, "  plain"),
    (QWEN, None, "<thi", None, "<thi"),
    (QWEN, None, "", None, None),
    (QWEN, None, "<think>\n\n</think>\n\nSo.", None, "So."),
    (QWEN, None, "<think>never closed </thin", "never closed </thin", None),
    (QWEN, None, "<think>a</think>\n<think>b</think>", "a", "<think>b</think>"),
    (QWEN, True, "because ž</think>so 🎉", "because ž", "so 🎉"),
    (QWEN, False, "so", None, "so"),
    (DEEPSEEK, None, "\nbecause\n\n</think>\n\nso\n", "because", "so\n"),
    (DEEPSEEK, None, "<think>\nbecause</think>so", "because", "so"),
    (DEEPSEEK, None, "never closed", "never closed", None),
    (DEEPSEEK, None, "<thin air", "<thin air", None),
    (DEEPSEEK, False, "answer", None, "answer"),
    (DEEPSEEK, None, "</think>a", None, "a"),
]


def streamed(form, inside, pieces):
    splitter = ReasoningSplitter(form, inside=inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(p[0] for p in parts) or None, "".join(p[1] for p in parts) or None


@pytest.mark.parametrize(("form", "inside", "text", "reasoning", "content"), CASES)
def test_split_at_once_and_cut_anywhere(form, inside, text, reasoning, content):
    assert split_reasoning(text, form, inside=inside) == (reasoning, content)
    for cut in range(len(text) + 1):
        assert streamed(form, inside, [text[:cut], text[cut:]]) == (reasoning, content), cut
    assert streamed(form, inside, text) == (reasoning, content)


def test_reasoning_is_not_held_back():
    splitter = ReasoningSplitter(DEEPSEEK)
    assert splitter.feed("one two ") == ("one two", "")
    assert splitter.feed("three</thi") == (" three", "")
    assert splitter.feed("s") == ("</this", "")
    assert splitter.feed("</think>\nfour ") == ("", "four ")


@settings(max_examples=60, deadline=None)
@given(st.text("ab <>/think\n", max_size=25), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans())
def test_any_text_in_any_pieces(text, sizes, always):
    form, pieces, at, n = ReasoningForm(always=always), [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[n % len(sizes)]])
        at, n = at + len(pieces[-1]), n + 1
    assert streamed(form, None, pieces) == split_reasoning(text, form)


def test_names_of_forms():
    assert reasoning_form("qwen3") is QWEN
    with pytest.raises(ConfigError, match=r"reasoning_parser='x' is not known.*deepseek_r1"):
        reasoning_form("x")


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("xgrammar")
    from grammar_walk import store

    made = store()
    yield made
    made.close()


WANTED = [
    (StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}), "{"),
    (StructuredOutputs(json_object=True), "{"),
    (StructuredOutputs(regex="[xy]{2}"), "x"),
    (StructuredOutputs(choice=["left", "right"]), "l"),
    (StructuredOutputs(grammar='root ::= "(" [ab] ")"'), "("),
    (StructuredOutputs(structural_tag={"format": {"type": "const_string", "value": "k"}}), "k"),
]


@pytest.mark.parametrize(("wanted", "first"), WANTED, ids=lambda v: getattr(v, "kind", ""))
@pytest.mark.parametrize("form", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek_r1"])
def test_a_demand_holds_after_the_reasoning(grammars, wanted, first, form):
    from grammar_walk import begins

    after = after_reasoning(wanted, form)
    begin = "" if form.always else "<think>\n"
    assert begins(grammars, after, f"{begin}Hm, {{[( anything ž.\n</think>\n\n{first}")
    assert begins(grammars, after, f"{begin}x</think>{first}")
    assert not begins(grammars, after, f"{begin}x</think>?")
    if not form.always:
        assert begins(grammars, after, first), "reasoning may be left out"
        assert not begins(grammars, after, "?")
    assert json.loads(after.source)["format"]["type"] == "sequence"

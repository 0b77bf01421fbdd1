"""Languages compiled, followed token by token, remembered and refused; without a model."""

import json
import random
import re
import subprocess
import sys
import threading
import time

import jsonschema
import pytest
from grammar_walk import allowed, fits, matcher_of, store, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_level, metaspace

from qengine import StructuredOutputs, StructuredOutputsParams
from qengine.config import StructuredConfig
from qengine.errors import ConfigError, RequestError
from qengine.structured import grammars
from qengine.structured.grammars import GrammarStore
from qengine.structured.matcher import has_tokens, mask_words, words_of

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def toy():
    made = store()
    yield made
    made.close()


def want(**fields):
    return StructuredOutputs(**fields)


SCHEMAS = [
    {"type": "string", "maxLength": 4},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}, "b": {"type": "integer"}},
     "required": ["a"], "additionalProperties": False},
    {"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2, "additionalProperties": {"type": "null"}},
    {"type": "array", "items": {"enum": ["x\n", 'ž"', 5, None]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "string", "pattern": "^a[^b]{1,3}$"}, {"$ref": "#/$defs/x"}],
     "$defs": {"x": {"type": "number"}}},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]},
]  # fmt: skip


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "b{1,3}"}, "end": "</a>"}


@pytest.mark.parametrize("one_line", [False, True])
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_every_random_text_of_a_schema_is_json_and_fits_it(toy, schema, one_line):
    rng, ended = random.Random(1), 0
    for _ in range(25):
        text = walk(toy, want(json=schema, disable_any_whitespace=one_line), rng)
        if text is not None:
            ended += 1
            value = json.loads(text)
            if "\ufffd" not in text:  # xgrammar takes half of a surrogate pair for a character
                jsonschema.validate(value, schema)
            assert not one_line or "\n" not in text
    assert ended >= 10


@pytest.mark.parametrize("make", [byte_level, metaspace], ids=["byte_level", "metaspace"])
@pytest.mark.parametrize(
    ("wanted", "right"),
    [
        ({"regex": r"[a-c]{2,4}(-\d{1,2}|x)"}, lambda text: re.fullmatch(r"[a-c]{2,4}(-[0-9]{1,2}|x)", text)),
        ({"choice": ["red", "re", 'gr"een\n', "žluť \\x"]}, lambda text: text in ["red", "re", 'gr"een\n', "žluť \\x"]),
        ({"grammar": 'root ::= "<" item ("," item)* ">"\nitem ::= [xy] "!"?'},
         lambda text: re.fullmatch(r"<[xy]!?(,[xy]!?)*>", text)),
        ({"structural_tag": {"format": TAG}}, lambda text: re.fullmatch("<a>b{1,3}</a>", text)),
    ],
    ids=["regex", "choice", "grammar", "structural_tag"],
)  # fmt: skip
def test_every_random_text_is_of_its_language(make, wanted, right):
    made, rng = store(make()), random.Random(2)
    texts = [walk(made, want(**wanted), rng, make()) for _ in range(20)]
    assert all(text is not None and right(text) for text in texts), texts
    assert len(set(texts)) > 2
    made.close()


def test_json_object_is_an_object_of_any_kind(toy):
    for text, good in (('{"a": [1, {"b": null}]}', True), ("{}", True), ("[1]", False), ("5", False)):
        assert fits(toy, want(json_object=True), text) == good, text


def test_special_tokens_are_no_text_and_only_the_end_token_ends(toy):
    tokenizer = byte_level()
    inside = matcher_of(toy, want(regex=r"[^x]+"))
    some = allowed(inside, toy.vocab_size)
    assert not set(some) & set(tokenizer.all_special_ids)
    inside.follow(tokenizer.encode("abc"))
    assert set(allowed(inside, toy.vocab_size)) & set(tokenizer.all_special_ids) == {tokenizer.eos_token_id}


def test_state_is_a_function_of_the_tokens(toy):
    tokenizer = byte_level()
    ids = tokenizer.encode("abcabc", add_special_tokens=False)
    matcher = matcher_of(toy, want(regex="(abc)*"))
    whole = []
    for count in range(len(ids) + 1):
        matcher.follow([9, 9, *ids[:count]], 2)
        matcher.follow([9, 9, *ids[:count], -1, -1], 2)  # tokens that are being sampled change nothing
        whole.append(allowed(matcher, toy.vocab_size))
    for count in (2, 0, 5, 1, len(ids)):
        matcher.follow([9, 9, *ids[:count]], 2)
        assert allowed(matcher, toy.vocab_size) == whole[count]
    matcher.follow([*ids, tokenizer.eos_token_id])
    assert matcher.ended
    assert len(allowed(matcher, toy.vocab_size)) == toy.vocab_size, "what follows the end is nobody's business"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"regex": "(a"}, "regex cannot be compiled: .*parenthesis is not closed"),
        ({"regex": r"\bx"}, "regex cannot be compiled: .*Word boundary is not supported"),
        ({"grammar": "root ::= other"}, 'grammar cannot be compiled: .*"other" is not defined'),
        ({"grammar": "root ::= root"}, "grammar allows no text at all"),
        ({"json": {"type": "foo"}}, "json cannot be compiled: Unsupported type"),
        ({"json": '{"enum": []}'}, "json cannot be compiled: enum array must not be empty"),
        ({"json": "false"}, "json cannot be compiled"),
        ({"structural_tag": {"format": {"type": "nothing"}}}, "structural_tag cannot be compiled"),
        ({"structural_tag": {}}, "structural_tag cannot be compiled"),
    ],
)
def test_what_is_no_language_is_refused_with_the_reason(toy, wanted, text):
    with pytest.raises(RequestError, match=text) as caught:
        toy.request(StructuredOutputs(**wanted)).result(60)
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "exactly one of json, .*got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice together"),
        ({"json_object": False}, "json_object=False is not allowed; give True"),
        ({"json_object": 1}, "json_object=1"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "5"}, "json=5 is not a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is not JSON"),
        ({"json": {"$ref": "http://x/y"}}, "only those within the schema"),
        ({"json": json.loads("[" * 70 + "]" * 70)}, "not a JSON schema"),
        ({"json": '{"items":' * 70 + "{}" + "}" * 70}, "nested more than 64 deep"),
        ({"json": "[" * 200_000}, "json is not JSON"),
        ({"regex": ""}, "regex='' is not allowed"),
        ({"regex": "\ud800"}, "regex is not valid text"),
        ({"grammar": 5}, "grammar=5"),
        ({"choice": []}, "leaves nothing"),
        ({"choice": "abc"}, "choice='abc' is not allowed; give a list"),
        ({"choice": ["a", 5]}, "an entry of choice=5"),
        ({"structural_tag": "[]"}, "structural_tag="),
        ({"regex": "a", "disable_any_whitespace": "yes"}, "disable_any_whitespace='yes'"),
        ({"json_object": True, "whitespace_pattern": " *"}, "whitespace_pattern is not supported"),
    ],
)
def test_fields_that_are_not_allowed(fields, text):
    with pytest.raises(RequestError, match=text):
        StructuredOutputs(**fields)


def test_forms_of_the_same_schema_are_one():
    assert StructuredOutputsParams is StructuredOutputs
    schema = {"type": "object", "properties": {"č": {}}}
    assert StructuredOutputs(json=schema).key == StructuredOutputs(json=json.dumps(schema, ensure_ascii=False)).key
    assert StructuredOutputs(json=schema).key != StructuredOutputs(json=schema, disable_any_whitespace=True).key
    assert StructuredOutputs(regex="a").key != StructuredOutputs(grammar="a").key


def test_compiled_once_and_found_again(monkeypatch):
    made, count = store(), []
    compile_regex = grammars.COMPILE["regex"]
    monkeypatch.setitem(
        grammars.COMPILE, "regex", lambda *a: count.append(a[1]) or time.sleep(0.05) or compile_regex(*a)
    )
    first = [made.request(StructuredOutputs(regex="ab*")) for _ in range(5)]
    assert len({id(future.result(60)) for future in first}) == 1
    assert made.request(StructuredOutputs(regex="ab*")).done()
    assert count == ["ab*"]
    made.close()


def test_the_cache_is_bounded_and_drops_what_was_not_used_for_longest():
    made = store(structured_outputs_cache_mib=0.02, structured_outputs_threads=1)
    for i in range(12):
        made.request(StructuredOutputs(regex=f"[a-z]{{3}}{i}")).result(60)
        made.request(StructuredOutputs(regex="[a-z]{3}0")).result(60)
    assert 0 < made.cached_bytes <= 0.02 * 2**20
    assert made.request(StructuredOutputs(regex="[a-z]{3}0")).done()
    assert not made.request(StructuredOutputs(regex="[a-z]{3}1")).done()
    none = store(structured_outputs_cache_mib=0)
    assert none.request(StructuredOutputs(regex="a")).result(60)
    assert none.cached_bytes == 0
    made.close()
    none.close()


def test_limits_and_what_is_missing():
    with pytest.raises(RequestError, match="choice has 12 bytes; at most 10 are allowed"):
        store(structured_outputs_max_bytes=10).request(StructuredOutputs(choice=["žžžž"]))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarStore(None, 5, frozenset([1]), StructuredConfig()).request(StructuredOutputs(regex="a"))
    with pytest.raises(RequestError, match="needs an end token"):
        GrammarStore(byte_level(), 300, frozenset(), StructuredConfig()).request(StructuredOutputs(regex="a"))
    for bad in ({"structured_outputs_max_bytes": 0}, {"structured_outputs_cache_mib": -1},
                {"structured_outputs_threads": 0}, {"structured_outputs_timeout": 0}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(bad))):
            StructuredConfig(**bad)


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"pip install 'qengine\[structured\]'"):
        store().request(StructuredOutputs(regex="a"))


def test_nothing_is_imported_before_it_is_needed():
    code = "import sys, qengine.engine.engine; assert 'xgrammar' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiling_leaves_other_threads_the_interpreter():
    """Compiling is C++ that lets go of the interpreter: else a step would wait for it."""
    made = store()
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(400)}}
    future, gaps, last = made.request(StructuredOutputs(json=schema)), [], time.monotonic()
    while not future.done():
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - last)
        last = now
    assert future.result()
    assert len(gaps) < 20 or sorted(gaps)[len(gaps) // 2] < 0.1
    assert threading.active_count() < 50
    made.close()


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 199), max_size=30), st.integers(1, 200))
def test_words_and_bits(ids, vocab):
    words = words_of(sorted(ids), mask_words(vocab))
    kept = [token for token in range(mask_words(vocab) * 32) if has_tokens(words, [token])[0]]
    assert kept == sorted(token for token in ids if token < mask_words(vocab) * 32)

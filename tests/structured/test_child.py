"""Languages that may take minutes to compile: in a process of their own, which can be ended."""

import json
import threading
import time

import pytest
from grammar_walk import fits, store
from toy_tokenizers import byte_level

from qengine import StructuredOutputs
from qengine.errors import RequestError
from qengine.structured import child as child_module
from qengine.structured.child import Child
from qengine.structured.languages import is_risky
from qengine.structured.vocabulary import token_table

xgrammar = pytest.importorskip("xgrammar")
HOSTILE = "|".join(f"[a-z]{{{i},{i + 50}}}x" for i in range(1, 2000))


@pytest.fixture(scope="module")
def table():
    return token_table(byte_level(), len(byte_level()), [byte_level().eos_token_id])


@pytest.fixture(scope="module")
def child(table):
    made = Child(table)
    yield made
    made.close()


def test_which_are_compiled_apart():
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    assert not is_risky("json", json.dumps(schema))
    schema["properties"]["q"] = {"type": "string", "pattern": "a+"}
    assert is_risky("json", json.dumps(schema))
    assert is_risky("regex", HOSTILE)
    assert not is_risky("regex", "[a-z]{1,20}")
    assert not is_risky("choice", json.dumps(["a" * 1000]))
    assert is_risky("json", json.dumps({"enum": ["a" * 20_000]}))


def test_one_that_takes_too_long_is_ended_and_the_next_is_served(child):
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"structured_outputs.regex takes more than 0.5 s to compile; simplify it"):
        child.compile("regex", HOSTILE, True, 0.5)
    assert time.monotonic() - start < 10
    assert child.compile("regex", "a|b", True, 60).memory_size_bytes > 0
    with pytest.raises(RequestError, match=r"regex cannot be compiled: Regex parsing error.*not closed"):
        child.compile("regex", "(a", True, 60)


def test_what_it_compiles_is_the_same_language():
    made, regex = store(), "(ab|c){3}" + "d" * 300
    wanted = StructuredOutputs(regex=regex)
    assert is_risky("regex", regex)
    assert fits(made, wanted, "abcab" + "d" * 300)
    assert not fits(made, wanted, "abcab" + "d" * 299)
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        made.request(StructuredOutputs(regex=regex + "(")).result(60)
    [one] = made._children
    made.close()
    assert one._process.poll() is not None, "a process is left behind"


def test_closing_ends_what_is_being_compiled(table):
    made, raised = Child(table), []

    def run():
        try:
            made.compile("regex", HOSTILE, True, 60)
        except RequestError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while made._process is None:
        time.sleep(0.01)
    made.close()
    thread.join(20)
    assert raised
    with pytest.raises(RequestError, match="the engine is closing"):
        made.compile("regex", "a", True, 60)


def test_a_form_that_is_too_large_is_not_handed_over(table, monkeypatch):
    compiler = xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)
    question = {"kind": "regex", "source": "[a-z]{3}", "free": True}
    assert "compiled" in child_module.answer(compiler, question)
    monkeypatch.setattr(child_module, "LARGEST", 100)
    assert "MiB when compiled" in child_module.answer(compiler, question)["error"]

"""benchmarks/same_tokens.py: what it takes for a tie and what not, with processes that are made up."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "same_tokens.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("same_tokens", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["same_tokens"] = module
    spec.loader.exec_module(module)
    return module


class Made:
    """A side whose log-probabilities are a function of the context."""

    def __init__(self, rows):
        self._rows = rows
        self._asked = []

    def ask(self, contexts):
        self._asked = contexts

    def answer(self):
        return [self._rows(context) for context in self._asked]


def _load(*tokens):
    return {"prompts": [[100 + i] for i in range(len(tokens))], "tokens": list(tokens), "seconds": 1.0}


def test_the_first_difference_of_each_request(script):
    found = script.differences(_load([1, 2, 3], [4, 5], [7]), _load([1, 9, 9], [4, 5], [8]))
    assert found == [(0, 1), (2, 0)]


def _sides(gap, error=0.01):
    def own(context):
        # After a whole prefix of 5 and 6, the tokens 7 and 8 are `gap` apart; elsewhere 1 is far in front.
        if context[1:] == [5, 6]:
            return {"7": -1.0, "8": -1.0 - gap}
        return {"1": -0.1, "2": -3.0}

    def other(context):
        return {token: value + (error if token in ("1", "7") else 0) for token, value in own(context).items()}

    return [Made(own), Made(other)]


def test_a_near_tie_is_one(script):
    result = script.compare(_sides(0.02), {"mixed": _load([5, 6, 7, 3])}, {"mixed": _load([5, 6, 8, 4])})
    load = result["loads"]["mixed"]
    assert load["not_ties"] == 0
    assert load["same"] == 0
    assert load["tokens_compared"] == 3
    assert load["gap_max"] == pytest.approx(0.03)
    assert result["tie_at_most"] == pytest.approx(0.03)


@pytest.mark.parametrize("tokens", [[5, 6, 8, 4], [5, 6, 99, 4]])
def test_a_token_that_is_clearly_worse_is_no_tie(script, tokens):
    result = script.compare(_sides(0.5), {"mixed": _load([5, 6, 7, 3])}, {"mixed": _load(tokens)})
    assert result["loads"]["mixed"]["not_ties"] == 1


def test_equal_tokens_need_no_tie(script):
    result = script.compare(_sides(0.5), {"streams": _load([5, 6, 7])}, {"streams": _load([5, 6, 7])})
    assert result["loads"]["streams"] == {
        "requests": 1,
        "same": 1,
        "tokens_compared": 3,
        "gap_median": None,
        "gap_max": None,
        "not_ties": 0,
        "seconds": [1.0, 1.0],
    }

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.engine.stop_strings import StopStrings


def feed(stops, pieces, include=False):
    checker = StopStrings(stops, include=include)
    shown = []
    for piece in pieces:
        shown.append(checker.push(piece))
        if checker.matched is not None:
            return shown, checker.matched
    shown.append(checker.flush())
    return shown, None


def test_stop_string_in_pieces_is_never_shown():
    shown, matched = feed(["DEFGHIJ"], ["ABC D", "EF", "G", "HI", "J and more"])
    # "D" after the space is held back from the first piece on.
    assert shown == ["ABC ", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_what_only_looked_like_a_stop_string_is_shown():
    shown, matched = feed(["DEFGHIJ"], ["ABCD", "EF", "GX", "Y"])
    assert "".join(shown) == "ABCDEFGXY"
    assert shown == ["ABC", "", "DEFGX", "Y", ""]
    assert matched is None


def test_stop_string_inside_one_piece():
    assert feed(["stop"], ["one stop two"]) == (["one "], "stop")
    assert feed(["stop"], ["one stop two"], include=True) == (["one stop"], "stop")


def test_unfinished_beginning_is_shown_at_the_end():
    assert feed(["stop"], ["one st"]) == (["one ", "st"], None)


def test_self_overlapping_stop_string():
    assert feed(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_first_complete_match_counts():
    assert feed(["world", "lo w"], ["hello world"]) == (["hel"], "lo w")
    assert feed(["b", "ab"], ["xab"]) == (["x"], "ab")


def test_unchecked_text_is_not_matched_later():
    checker = StopStrings(["ab"])
    shown = [checker.push("xab", check=False), checker.push("a"), checker.push("b")]
    assert shown == ["xab", "", ""]
    assert checker.matched == "ab"


def test_match_that_ends_in_checked_text_counts():
    checker = StopStrings(["abc"])
    assert checker.push("ab", check=False) == ""
    assert checker.push("cd") == ""
    assert checker.matched == "abc"


@pytest.mark.parametrize("include", [True, False])
@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
def test_result_does_not_depend_on_the_pieces(include, text, stops, cuts):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, matched = feed(stops, pieces, include)
    ends = [(i + len(s), i, s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    if ends:
        end, start, stop = min(ends)
        assert ("".join(shown), matched) == (text[: end if include else start], stop)
    else:
        assert ("".join(shown), matched) == (text, None)

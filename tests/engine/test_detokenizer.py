import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_level, metaspace

from qengine.engine.detokenizer import IncrementalDetokenizer

TEXTS = [
    "Hello world",
    " leading space and  two",
    "ďábel ď ďď",
    "😀 emoji 🎉🎉 and 👩‍👩‍👧‍👦 family, 🇨🇿 flag",
    "漢字かな交じり文 한국어 العربية",
    "tabs\tand\nnew\r\nlines \n\n end ",
    "<s> text that looks special </s>",
    "a\u0301 combining, \U0001f468\U0001f3fd\u200d\U0001f4bb",
]
TOKENIZERS = {"byte_level": byte_level, "metaspace": metaspace}


def pieces_of(tokenizer, ids, context=(), **options):
    detokenizer = IncrementalDetokenizer(tokenizer, context, **options)
    return [detokenizer.add([i]) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_whole_characters_and_add_up(kind, text, skip):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 1
    pieces = pieces_of(tokenizer, ids, skip_special_tokens=skip)
    assert not any("\ufffd" in piece for piece in pieces)
    whole = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == whole


def test_smollm2_tokenizer(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_one_character_over_several_tokens_comes_out_at_its_last():
    tokenizer = metaspace()
    ids = tokenizer.encode("aďb", add_special_tokens=False)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "▁a<0xC4><0x8F>b"
    assert pieces_of(tokenizer, ids)[-4:] == ["", "ď", "b", ""]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_continues_the_prompt(kind):
    tokenizer = TOKENIZERS[kind]()
    whole = "Hello world is a test ďábel 😀 the end"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\ufffd"):
            continue
        assert before + "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == whole, cut


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_character_cut_off_at_the_end_is_dropped(kind):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("ok 😀", add_special_tokens=False)
    for cut in range(1, 4):
        assert "".join(pieces_of(tokenizer, ids[:-cut])).rstrip(" ") == "ok"


def test_skipped_special_tokens_do_not_eat_the_space_after_them():
    tokenizer = metaspace()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    ids = [hello, 2, 2, 1, world]
    assert "".join(pieces_of(tokenizer, ids)) == "Hello world" == tokenizer.decode(ids, skip_special_tokens=True)
    shown = "".join(pieces_of(tokenizer, ids, skip_special_tokens=False))
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)


def test_token_without_text_does_not_eat_the_space_after_it():
    tokenizer = metaspace()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    nothing = 5000  # not in the vocabulary: decoded to nothing
    assert tokenizer.decode([hello, nothing, world]) == "Hello world"
    assert "".join(pieces_of(tokenizer, [hello, nothing, nothing, world])) == "Hello world"


def test_wrong_bytes_do_not_hold_text_back_for_ever():
    tokenizer = byte_level()
    bad = tokenizer.convert_tokens_to_ids("ÿ")  # byte 0xFF, never valid
    good = tokenizer.encode("ok 😀", add_special_tokens=False)
    pieces = pieces_of(tokenizer, [bad] * 40 + good)
    assert "".join(pieces).endswith("ok 😀")
    assert sum(len(p) for p in pieces[:40]) >= 30
    assert max(len(p) for p in pieces) < 20
    assert "".join(pieces) == tokenizer.decode([bad] * 40 + good)


def test_cost_a_token_does_not_grow_with_the_text():
    class Counting:
        def __init__(self, tokenizer):
            self.tokenizer, self.longest = tokenizer, 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return self.tokenizer.decode(ids, **options)

    tokenizer = Counting(byte_level())
    ids = byte_level().encode("Příliš žluťoučký 😀 kůň. " * 50, add_special_tokens=False)
    pieces_of(tokenizer, ids)
    assert tokenizer.longest <= 16


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="aě ď😀漢👩\u200d\n.", max_size=20), st.sampled_from(sorted(TOKENIZERS)))
def test_any_text(text, kind):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_byte_level_tokens_equal_decoding_the_whole_up_to_a_cut_character(rng: random.Random):
    tokenizer = byte_level()
    ids = [rng.randrange(3, len(tokenizer)) for _ in range(rng.randint(1, 30))]
    whole = tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer, ids)).rstrip("\ufffd") == whole.rstrip("\ufffd")

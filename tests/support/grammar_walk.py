"""Texts of a language: random ones, by the masks alone, and whether a given one fits."""

from __future__ import annotations

import numpy as np
from toy_tokenizers import byte_level

from qengine.config import StructuredConfig
from qengine.structured.grammars import GrammarStore
from qengine.structured.matcher import has_tokens, mask_words


def store(tokenizer=None, **limits):
    tokenizer = tokenizer or byte_level()
    stop = frozenset([tokenizer.eos_token_id])
    return GrammarStore(tokenizer, len(tokenizer), stop, StructuredConfig(**limits))


def matcher_of(made, wanted):
    return made.matcher(made.request(wanted).result(60))


def allowed(matcher, vocab):
    words = np.zeros(mask_words(vocab), dtype=np.int32)
    matcher.fill(words)
    return [token for token, yes in enumerate(has_tokens(words, range(vocab))) if yes]


def walk(made, wanted, rng, tokenizer=None, limit=600):
    """A random text of the language, or None where it did not end in time."""
    tokenizer = tokenizer or byte_level()
    matcher, ids, eos = matcher_of(made, wanted), [], tokenizer.eos_token_id
    for _ in range(limit):
        some = allowed(matcher, made.vocab_size)
        assert some, "a text that cannot go on"
        if some == [eos] or (eos in some and rng.random() < 0.4):
            return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids.append(rng.choice([token for token in some if token != eos]))
        matcher.follow(ids)
        assert not matcher.free
    return None


def begins(made, wanted, text):
    """Whether some text of the language begins so."""
    matcher = matcher_of(made, wanted)
    matcher.follow(byte_level().encode(text, add_special_tokens=False))
    return not matcher.free


def fits(made, wanted, text):
    """Whether a text is of the language."""
    matcher = matcher_of(made, wanted)
    matcher.follow([*byte_level().encode(text, add_special_tokens=False), byte_level().eos_token_id])
    return matcher.ended

"""The tokenizer as xgrammar takes it."""

from __future__ import annotations

from typing import Any

from qengine.errors import RequestError


def import_xgrammar() -> Any:
    """The module. Raises RequestError where it is not installed."""
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(
            f"structured output needs xgrammar, which cannot be imported ({error}); pip install 'qengine[structured]'"
        ) from error
    return xgrammar


def token_table(tokenizer: Any, vocab_size: int, stop_ids: list[int]) -> Any:
    """xgrammar's TokenizerInfo of the ids below vocab_size.

    Special tokens are no text: they leave none when output is decoded, so none may stand for the characters of its
    name. Nor may ids that the tokenizer does not know. stop_ids: tokens that end a text which is complete.
    """
    xgrammar = import_xgrammar()
    try:
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    except Exception as error:  # whatever its readers of tokenizers raise
        raise RequestError(
            f"structured output cannot read this model's tokenizer ({type(tokenizer).__name__}): {error}"
        ) from error
    words = [""] * vocab_size
    for word, token in tokenizer.get_vocab().items():
        if token < vocab_size:
            words[token] = word
    for token in special_ids(tokenizer):
        if token < vocab_size:
            words[token] = ""
    return xgrammar.TokenizerInfo(
        words,
        vocab_type=found.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stop_ids,
        add_prefix_space=found.add_prefix_space,
    )


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens, those among the added ones included."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {token for token, word in added.items() if word.special}

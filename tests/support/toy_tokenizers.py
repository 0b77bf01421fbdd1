"""Small tokenizers made on the spot: byte-level BPE (GPT style) and Metaspace with byte fallback (Llama 2 style)."""

from __future__ import annotations

from functools import lru_cache

TEXTS = [
    "Hello world, this is a test of tokens. " * 3,
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "The quick brown fox; numbers 123 and 4567!",
]


def _wrap(tokenizer, **special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@lru_cache(maxsize=1)
def byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _wrap(tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@lru_cache(maxsize=1)
def metaspace():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    letters = [*sorted(set("".join(TEXTS).replace(" ", "")) - set("ď")), "▁"]
    words = ["▁Hello", "▁world", "▁test", "▁the", "▁is", "▁a"]
    merges, vocab = [], {}
    for token in specials + byte_tokens + letters:
        vocab.setdefault(token, len(vocab))
    for word in words:
        part = word[0]
        for letter in word[1:]:
            if (part, letter) not in merges:
                merges.append((part, letter))
            part += letter
            vocab.setdefault(part, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

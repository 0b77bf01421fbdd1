"""Structured output: a language to masks over the vocabulary, by xgrammar. No queues and no sampling here."""

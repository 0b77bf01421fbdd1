"""Tiny random models with a tokenizer of their own, as folders, and transformers' greedy answer to compare with."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tiny_models import tiny
from toy_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.lru_cache(maxsize=8)
def tiny_folder(family="smollm2", template=True, vocab=320, **overrides):
    """(transformers' model, folder with tokenizer). The head is wider than the tokenizer: the rest is padding."""
    model, folder = tiny(family, vocab_size=vocab, **overrides)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE if template else None
    tokenizer.save_pretrained(folder)
    return model, folder


def copy_of(folder, **edits):
    """The folder again with JSON files changed: file name without .json -> fields."""
    target = Path(tempfile.mkdtemp(prefix="tiny-llm-"))
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, fields in edits.items():
        path = target / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **fields}))
    return target


@torch.no_grad()
def reference_greedy(model, prompt, count, vocab=None, eos=()):
    """transformers' greedy tokens, each from a full forward pass."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits[:vocab].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]

"""Calibration documents as tokens, and windows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qengine.convert.documents import Document, bundled_text, read_documents
from qengine.errors import CheckpointError, ConfigError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model folder; CheckpointError if it has none that works."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises nearly anything for a damaged or missing tokenizer
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{folder}: its tokenizer does not load ({reason}); "
            "copy the tokenizer files of the model into the folder, or use --method rtn, which needs no text"
        ) from error


def tokenize(tokenizer: Any, documents: list[Document]) -> torch.Tensor:
    """int64 [T]: the documents' tokens, one after the other, with the end-of-text token between documents.

    Conversations go through the tokenizer's chat template. Raises ConfigError if there is none, or it refuses one.
    """
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for number, document in enumerate(documents):
        if number:
            ids.extend(ends)
        text = document if isinstance(document, str) else _templated(tokenizer, document, number)
        ids.extend(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return torch.tensor(ids, dtype=torch.int64)


def _templated(tokenizer: Any, messages: list[dict[str, Any]], number: int) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template is a program of the checkpoint's and may raise anything
        raise ConfigError(
            f"calibration: conversation {number} cannot be put into the tokenizer's chat template ({error}); use "
            'samples with "text", or a checkpoint with a chat template'
        ) from error
    return text


def start_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before any text ([BOS] for most, nothing for some); every window begins with it."""
    ids = list(tokenizer("", verbose=False)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.bos_token_id:
        ids.pop()
    return ids


def sample_windows(
    ids: torch.Tensor, samples: int, length: int, *, seed: int, vocab_size: int, start: list[int] | None = None
) -> torch.Tensor:
    """int64 [samples, length]: windows that do not overlap, drawn with `seed`, in the order of the text.

    start: tokens that begin every window, part of its length. Raises ConfigError when the text has too few tokens, and
    CheckpointError when it has tokens that the model does not know.
    """
    first = torch.tensor(start or [], dtype=torch.int64)
    body = length - first.numel()
    if body < 1:
        raise ConfigError(f"calibration: --seq-len {length} leaves no room for text; give at least {first.numel() + 1}")
    available = ids.numel() // body
    if available < samples:
        lower = f"--samples to {available} or --seq-len" if available else f"--seq-len to {ids.numel() + first.numel()}"
        raise ConfigError(
            f"calibration: the text has {ids.numel()} tokens, {samples} samples of {length} need {samples * body}; "
            f"give more text, or lower {lower}"
        )
    top = int(ids.max())
    if top >= vocab_size:
        raise CheckpointError(
            f"calibration: the tokenizer makes token {top}, the model has {vocab_size}; the folder holds the tokenizer "
            "of another model, copy the right one into it"
        )
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(available, generator=generator)[:samples].sort().values
    return torch.stack([torch.cat((first, ids[i * body : (i + 1) * body])) for i in picked.tolist()])


__all__ = ["bundled_text", "load_tokenizer", "read_documents", "sample_windows", "start_tokens", "tokenize"]

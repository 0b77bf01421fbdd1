"""Text for calibration: bundled, plain or JSON lines, cut into windows of tokens."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError, ConfigError

BUNDLED = "calibration.txt"
EVALUATION = "evaluation.txt"


def bundled_text(name: str = BUNDLED) -> str:
    """A text that comes with the package (see data/README.md)."""
    folder = resources.files("qengine.convert") / "data"
    return (folder / name).read_text(encoding="utf-8")


def read_documents(path: str | os.PathLike[str] | None) -> list[str]:
    """The documents of a file: the whole of a .txt, each line's "text" of a .jsonl; None gives the bundled text.

    Raises ConfigError for a missing, empty, undecodable or malformed file.
    """
    if path is None:
        return [bundled_text()]
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f'--calibration {file}: no such file; give a .txt or a .jsonl with one {{"text": ...}} a line'
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--calibration {file}: byte {error.start} is not UTF-8; save the text as UTF-8, or pick a .txt or .jsonl"
        ) from error
    if "\0" in text:
        raise ConfigError(f"--calibration {file}: holds NUL bytes, so it is no text; give a .txt or a .jsonl in UTF-8")
    documents = _json_lines(file, text) if file.suffix.lower() in (".jsonl", ".ndjson") else [text]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"--calibration {file}: holds no text; omit the option to use the bundled text")
    return documents


def _json_lines(file: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--calibration {file}, line {number}: not JSON ({error})") from error
        found = value.get("text") if isinstance(value, dict) else None
        if not isinstance(found, str):
            raise ConfigError(f'--calibration {file}, line {number}: expected an object with a string "text"')
        documents.append(found)
    return documents


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


def tokenize(tokenizer: Any, documents: list[str]) -> torch.Tensor:
    """int64 [T]: the documents' tokens, one after the other, with the end-of-text token between documents."""
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for number, document in enumerate(documents):
        if number:
            ids.extend(ends)
        ids.extend(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
    return torch.tensor(ids, dtype=torch.int64)


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

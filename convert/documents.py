"""Where calibration text comes from: the bundled one, files, data sets of the Hugging Face hub; plain or as chats."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from qengine.errors import ConfigError

BUNDLED = "calibration.txt"
EVALUATION = "evaluation.txt"
DATASET = "dataset:"
ENOUGH = 40_000_000
"""Characters that are read at most: ten million tokens, of which windows are drawn."""

Document = str | list[dict[str, Any]]
"""A text, or a conversation: messages with "role" and "content"."""


def bundled_text(name: str = BUNDLED) -> str:
    """A text that comes with the package (see data/README.md)."""
    folder = resources.files("qengine.convert") / "data"
    return (folder / name).read_text(encoding="utf-8")


def read_documents(source: str | os.PathLike[str] | None) -> list[Document]:
    """The documents of a calibration source; None gives the bundled text.

    A .txt is one document. Each line of a .jsonl, row of a .parquet or of `dataset:NAME[:CONFIG][@SPLIT]` is one: its
    "text", or its "messages", a conversation. Raises ConfigError for what is missing, empty, undecodable or malformed,
    and for a library that is not installed.
    """
    if source is None:
        return [bundled_text()]
    if str(source).startswith(DATASET):
        found = list(_enough(_rows(_dataset(str(source).removeprefix(DATASET)), f"--calibration {source}")))
    else:
        found = _file(Path(source))
    found = [document for document in found if not isinstance(document, str) or document.strip()]
    if not found:
        raise ConfigError(f"--calibration {source}: holds no text; omit the option to use the bundled text")
    return found


def _file(file: Path) -> list[Document]:
    if not file.is_file():
        raise ConfigError(
            f'--calibration {file}: no such file; give a .txt, a .jsonl with one {{"text": ...}} a line, a .parquet, '
            "or dataset:NAME"
        )
    if file.suffix.lower() == ".parquet":
        return list(_enough(_rows(_parquet(file), f"--calibration {file}")))
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--calibration {file}: byte {error.start} is not UTF-8; save the text as UTF-8, or pick a .txt or .jsonl"
        ) from error
    if "\0" in text:
        raise ConfigError(f"--calibration {file}: holds NUL bytes, so it is no text; give a .txt or a .jsonl in UTF-8")
    return _json_lines(file, text) if file.suffix.lower() in (".jsonl", ".ndjson") else [text]


def _json_lines(file: Path, text: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--calibration {file}, line {number}: not JSON ({error})") from error
        found = _document(value)
        if found is None:
            raise ConfigError(
                f'--calibration {file}, line {number}: expected an object with a string "text", or with "messages"'
            )
        documents.append(found)
    return documents


def _document(row: Any) -> Document | None:
    """The text or the conversation of one row, None if it has neither."""
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("text"), str):
        text: str = row["text"]
        return text
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    return messages if all(isinstance(m, dict) and "role" in m and "content" in m for m in messages) else None


def _rows(rows: Iterable[Any], where: str) -> Iterator[Document]:
    for number, row in enumerate(rows):
        found = _document(row)
        if found is None:
            names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ConfigError(f'{where}, row {number}: has neither a string "text" nor "messages", but {names}')
        yield found


def _enough(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents until there is text enough."""
    read = 0
    for document in documents:
        yield document
        read += len(document) if isinstance(document, str) else sum(len(str(m["content"])) for m in document)
        if read >= ENOUGH:
            return


def _library(name: str, why: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--calibration: {why} needs {name}: pip install 'qengine[datasets]'") from error


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    parquet = _library("pyarrow.parquet", "a .parquet file")
    try:
        opened = parquet.ParquetFile(file)
        columns = [name for name in opened.schema_arrow.names if name in ("text", "messages")] or None
        yield from itertools.chain.from_iterable(
            batch.to_pylist() for batch in opened.iter_batches(batch_size=256, columns=columns)
        )
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"--calibration {file}: is no parquet file that can be read ({error})") from error


def _dataset(name: str) -> Iterator[dict[str, Any]]:
    datasets = _library("datasets", "a data set of the hub")
    path, _, split = name.partition("@")
    path, _, config = path.partition(":")
    try:
        yield from datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:  # not found, no such split or config, no network
        raise ConfigError(f"--calibration {DATASET}{name}: cannot be loaded ({str(error).splitlines()[0]})") from error

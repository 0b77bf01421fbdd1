"""The requests of a run: random ones of given lengths, or those of a ShareGPT-style file."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qengine.bench.loads import FIRST_TOKEN
from qengine.bench.serve.options import LoadOptions
from qengine.errors import ConfigError, QEngineError

TOKENIZERS = 16
"""Requests to /tokenize or /detokenize at once."""


class TextServer(Protocol):
    """What is needed of a server to make requests for it."""

    async def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        ...

    async def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True)
class Job:
    """One request: its prompt, as text or token ids, and the most tokens to generate."""

    prompt: str | tuple[int, ...]
    output_tokens: int


def random_jobs(options: LoadOptions, count: int) -> list[Job]:
    """Requests with lengths drawn evenly from the ranges, as token ids; the same for the same seed."""
    draw = random.Random(f"prompts {options.seed}")
    low = FIRST_TOKEN if options.vocab_size > 2 * FIRST_TOKEN else options.vocab_size // 4
    jobs = []
    for _ in range(count):
        length, most = draw.randint(*options.input_len), draw.randint(*options.output_len)
        jobs.append(Job(tuple(draw.randrange(low, options.vocab_size) for _ in range(length)), most))
    return jobs


async def as_texts(jobs: list[Job], server: TextServer) -> list[Job]:
    """The jobs with the texts of their tokens, by the server's tokenizer: /v1/chat/completions takes no ids."""

    async def one(job: Job) -> Job:
        return job if isinstance(job.prompt, str) else Job(await server.text_of(job.prompt), job.output_tokens)

    return await _some_at_once([one(job) for job in jobs])


async def dataset_jobs(options: LoadOptions, count: int, server: TextServer, most: int | None) -> tuple[list[Job], int]:
    """(requests of the file, how many were left out as too long).

    Each is a conversation's first message, with as many tokens to generate as its first answer has. most: the server's
    max_model_len. The order is drawn from the seed; a short file is gone through again.
    """
    assert options.dataset is not None, "only for runs with a file"
    pairs = read_pairs(options.dataset)
    random.Random(f"dataset {options.seed}").shuffle(pairs)

    async def one(pair: tuple[str, str]) -> tuple[Job, int]:
        prompt, answer = await asyncio.gather(*map(server.count_tokens, pair))
        return Job(pair[0], max(1, answer)), prompt + max(1, answer)

    jobs: list[Job] = []
    left_out = 0
    for start in range(0, len(pairs), count):
        sized = await _some_at_once([one(pair) for pair in pairs[start : start + count]])
        jobs += [job for job, tokens in sized if most is None or tokens <= most]
        left_out += sum(most is not None and tokens > most for _, tokens in sized)
        if len(jobs) >= count:
            return jobs[:count], left_out
    if not jobs:
        raise ConfigError(f"{options.dataset}: all {len(pairs)} conversations are longer than max_model_len={most}")
    return [jobs[index % len(jobs)] for index in range(count)], left_out


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(first message, first answer) of each conversation of a ShareGPT-style file. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a ShareGPT-style JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}; give a ShareGPT-style file") from error
    pairs = [pair for item in content for pair in [_pair(item)] if pair] if isinstance(content, list) else []
    if not pairs:
        raise ConfigError(
            f"{path}: holds no conversation; expected a list of "
            '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}'
        )
    return pairs


def _pair(item: Any) -> tuple[str, str] | None:
    turns = item.get("conversations") or item.get("conversation") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    first = next((i for i, turn in enumerate(turns) if turn.get("from") in ("human", "user")), None)
    if first is None or first + 1 >= len(turns):
        return None
    prompt, answer = turns[first].get("value"), turns[first + 1].get("value")
    whole = all(isinstance(text, str) and text for text in (prompt, answer))
    return (prompt, answer) if whole else None


async def _some_at_once(tasks: list[Any]) -> list[Any]:
    """The results in order; TOKENIZERS at once, since a tokenizing server has other things to do."""
    gate = asyncio.Semaphore(TOKENIZERS)

    async def one(task: Any) -> Any:
        async with gate:
            return await task

    try:
        return list(await asyncio.gather(*map(one, tasks)))
    except QEngineError as error:
        raise QEngineError(f"{error}; without it, use --endpoint completions with random lengths") from error

"""A request's prompts run by the engine, together, and their outputs as they come, whole or as pieces of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from qengine.async_llm import RequestOutputKind
from qengine.engine.async_stream import Tap
from qengine.engine.prompts import Prompt
from qengine.errors import QEngineError
from qengine.outputs import RequestOutput
from qengine.sampling_params import SamplingParams
from qengine.server.metrics import RequestRecord
from qengine.server.state import ServerState
from qengine.server.wire import Wire


@dataclass(frozen=True)
class Job:
    """What the engine is to do for one HTTP request.

    id: of the answer. endpoint: as the metrics name it. params: of each prompt.
    """

    id: str
    endpoint: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0


class Pieces(Protocol):
    """The form of a streamed answer: what its client is sent for each output, as events of the wire."""

    def of(self, index: int, output: RequestOutput) -> bytes:
        """What is new of prompt `index`; empty if there is nothing to send."""
        ...

    def last(self) -> bytes:
        """What follows the last output; may be empty."""
        ...


class _Direct:
    """A Tap: outputs go from the engine's report to the client's connection, and are counted."""

    __slots__ = ("_pieces", "_record", "_wire")

    def __init__(self, record: RequestRecord, pieces: Pieces, wire: Wire) -> None:
        self._record = record
        self._pieces = pieces
        self._wire = wire

    @property
    def open(self) -> bool:
        """See Tap."""
        return self._wire.open

    def put(self, output: RequestOutput) -> None:
        """See Tap."""
        self._record.output(output)
        piece = self._pieces.of(0, output)
        if piece:
            self._wire.write(piece)


async def run_one(
    state: ServerState,
    job: Job,
    index: int,
    kind: RequestOutputKind,
    tap: Callable[[RequestRecord], Tap] | None = None,
) -> AsyncGenerator[RequestOutput]:
    """The outputs of prompt `index`. Closing it, or cancelling its task, ends the request in the engine.

    tap: makes what takes outputs, and counts them, in place of this generator.
    """
    record = state.metrics.begin(job.endpoint, kind=kind, request_id=job.id)
    outputs = state.llm.generate(
        job.prompts[index],
        job.params,
        job.id,
        priority=job.priority,
        output_kind=kind,
        tap=None if tap is None else tap(record),
    )
    reason = "abort"
    try:
        async with aclosing(outputs):
            async for output in outputs:
                record.output(output)
                if output.finished:
                    reason = next((o.finish_reason for o in output.outputs if o.finish_reason), None) or "stop"
                yield output
    except QEngineError:
        reason = "error"
        raise
    finally:
        record.end(reason)


async def run_pieces(state: ServerState, job: Job, pieces: Pieces, wire: Wire | None) -> AsyncGenerator[bytes]:
    """The job's answer, as it comes. Slow readers get several steps at once.

    wire: takes pieces as soon as they are there, while nothing that this generator gave is still to be sent.
    """
    if len(job.prompts) == 1:
        tap = None if wire is None else lambda record: _Direct(record, pieces, wire)
        async with aclosing(run_one(state, job, 0, RequestOutputKind.DELTA, tap)) as outputs:
            async for output in outputs:
                if piece := pieces.of(0, output):
                    yield piece
    else:
        async with aclosing(_run_several(state, job)) as results:
            async for index, output in results:
                if piece := pieces.of(index, output):
                    yield piece
    if piece := pieces.last():
        yield piece


async def _run_several(state: ServerState, job: Job) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(prompt, what is new) of all prompts of the job."""
    news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(job.prompts))

    async def forward(index: int) -> None:
        last: BaseException | None = None
        try:
            async with aclosing(run_one(state, job, index, RequestOutputKind.DELTA)) as outputs:
                async for output in outputs:
                    await news.put((index, output))
        except Exception as error:
            last = error
        await news.put((index, last))

    tasks = [asyncio.create_task(forward(index)) for index in range(len(job.prompts))]
    try:
        left = len(tasks)
        while left:
            index, item = await news.get()
            if isinstance(item, RequestOutput):
                yield index, item
            elif item is None:
                left -= 1
            else:
                raise item
    finally:
        await _cancel(tasks)


async def run_whole(state: ServerState, job: Job) -> list[RequestOutput]:
    """The finished output of each prompt. The first error ends them all."""

    async def last(index: int) -> RequestOutput:
        found: RequestOutput | None = None
        async with aclosing(run_one(state, job, index, RequestOutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                found = output
        assert found is not None, "a request ends with an output or an error"
        return found

    if len(job.prompts) == 1:
        return [await last(0)]
    tasks = [asyncio.create_task(last(index)) for index in range(len(job.prompts))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Usage:
    """Tokens of a request so far."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, output: RequestOutput, *, first: bool) -> None:
        """Count an output; first: of its prompt."""
        if first:
            self.prompt += len(output.prompt_token_ids)
            self.cached += output.num_cached_tokens
        for choice in output.outputs:
            self.completion += len(choice.token_ids)

    def body(self) -> dict[str, Any]:
        """As OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

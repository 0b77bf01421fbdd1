"""One request as its consumer in the event loop sees it: what the engine thread reports, merged until it is taken.

The engine thread sends `Progress`; `RequestStream.add` and `take` run in the event loop. A consumer that is slow finds
several steps merged into one output, so nobody waits for it and nothing piles up but its own text.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from qengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta

Logprobs = list[dict[int, Logprob]]


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds: all so far, what is new, or nothing until the end, and then all."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class Tap(Protocol):
    """Takes a stream's outputs as they come, in the event loop, where to wake the consumer for each is too much work.

    It gets those that are not the last while its consumer waits for one and nothing else is to be handed out; all
    others, and those that come while it is not open, go to the consumer. So the order is kept.
    """

    @property
    def open(self) -> bool:
        """Whether `put` may be called now."""
        ...

    def put(self, output: RequestOutput) -> None:
        """Take an output; it must not take long. What it raises is raised in the consumer."""
        ...


@dataclass(slots=True)
class Progress:
    """What the engine did for one request since the last report.

    deltas: in order. logprobs: (sequence index, those of the deltas' tokens), where asked for. prompt_token_ids: as
    computed (truncated, BOS), in a request's first report. prompt_logprobs, metrics: snapshots, None if unchanged.
    finished: no report follows. error: ends the request instead of a result.
    """

    deltas: list[StreamDelta] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    finished: bool = False
    error: BaseException | None = None


class _Choice:
    """One of a request's n sequences: all of it, or what was not handed out yet."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: Logprobs | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.changed = False

    def add(self, delta: StreamDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.changed = True

    def add_logprobs(self, entries: Logprobs) -> None:
        """One entry a token; the chosen token's own comes first in each."""
        if self.logprobs is None:
            self.logprobs = []
        self.logprobs += entries
        chosen = sum(next(iter(entry.values())).logprob for entry in entries)
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + chosen

    def output(self, whole: bool) -> CompletionOutput:
        """All so far (whole), or what is new, of which nothing is kept."""
        text, tokens, logprobs, self.changed = self.text, self.token_ids, self.logprobs, False
        if whole:
            tokens, logprobs = list(tokens), None if logprobs is None else list(logprobs)
        else:
            self.text, self.token_ids, self.logprobs = "", [], None if logprobs is None else []
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestStream:
    """The outputs of one request, for one consumer.

    on_started is called once: at the first report, or by `release` if the consumer leaves before it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        count: int,
        kind: RequestOutputKind,
        on_started: Callable[[], None] = lambda: None,
        tap: Tap | None = None,
    ) -> None:
        self.request_id = request_id
        self.kind = kind
        self.finished = False
        self._prompt = prompt
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._metrics: RequestMetrics | None = None
        self._choices = [_Choice(index) for index in range(count)]
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._tap = tap
        self._waiting = False
        self._on_started: Callable[[], None] | None = on_started

    def add(self, progress: Progress) -> None:
        """Merge a report; gives the tap what is new, or wakes the consumer."""
        if self.finished:
            return
        self.release()
        for delta in progress.deltas:
            self._choices[delta.index].add(delta)
        for index, entries in progress.logprobs:
            self._choices[index].add_logprobs(entries)
        if progress.prompt_token_ids is not None:
            self._prompt_token_ids = progress.prompt_token_ids
        if progress.prompt_logprobs is not None:
            self._prompt_logprobs = progress.prompt_logprobs
        if progress.metrics is not None:
            self._metrics = progress.metrics
        self.finished = progress.finished or progress.error is not None
        if progress.error is not None:
            self._error = progress.error
        if (self.finished or self.kind is not RequestOutputKind.FINAL_ONLY) and not self._tapped():
            self._news.set()

    def _tapped(self) -> bool:
        """Give the tap what is new, if it is its turn."""
        tap = self._tap
        if tap is None or self.finished or not self._waiting or self._news.is_set() or not tap.open:
            return False
        try:
            tap.put(self._output())
        except Exception as error:  # the other streams' reports are still to be merged
            self._error = error
            return False
        return True

    def release(self) -> None:
        """The request waits no longer."""
        if self._on_started is not None:
            started, self._on_started = self._on_started, None
            started()

    async def next(self) -> RequestOutput:
        """The next output; with `finished` set it is the last. Raises what ended the request, if that was an error."""
        self._waiting = True
        try:
            await self._news.wait()
        finally:
            self._waiting = False
        self._news.clear()
        if self._error is not None:
            raise self._error
        return self._output()

    def _output(self) -> RequestOutput:
        """All so far, or what was not handed out yet."""
        whole = self.kind is not RequestOutputKind.DELTA
        chosen = [choice for choice in self._choices if whole or choice.changed]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[choice.output(whole) for choice in chosen],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self._metrics,
        )

"""`AsyncLLM`: one model for many callers in an asyncio event loop, as users of vLLM's AsyncLLM know it.

    async with AsyncLLM("./Qwen2.5-7B-Instruct-AWQ") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

The engine is `LLM`'s own, in a thread of its own: the event loop is never held up by loading or by a step.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

from qengine.engine.async_commands import EngineDeadError
from qengine.engine.async_slots import QueueFullError, WaitingSlots
from qengine.engine.async_stream import RequestOutputKind, RequestStream, Tap
from qengine.engine.async_worker import EngineWorker
from qengine.engine.engine import Engine
from qengine.engine.prompts import Prompt, encode, read_prompt, render_chat, split_conversations, split_prompts
from qengine.engine.stats import EngineStats
from qengine.errors import ConfigError, QEngineError, RequestError
from qengine.llm import LLM
from qengine.outputs import RequestOutput
from qengine.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "EngineDeadError", "QueueFullError", "RequestOutputKind"]

LONG_TEXT = 20_000
"""Characters from which on a prompt is tokenized outside the event loop: some 10 ms of work."""


class AsyncLLM:
    """A model loaded for generation by many callers at once. For one event loop; its methods are not thread-safe.

    AsyncLLM(model, **settings): settings as for `LLM`. Nothing happens until `start`, which `async with` and the first
    request call; the model is loaded in the engine's thread.

    max_waiting_requests: most requests that wait for their first token; None is no limit. when_full: what happens to
    the next one: "wait" until one has started (in order of arrival), or "refuse" it with QueueFullError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        max_waiting_requests: int | None = 1024,
        when_full: Literal["wait", "refuse"] = "wait",
        **settings: Any,
    ) -> None:
        self._set_up(lambda: LLM(model, tokenizer, **settings), max_waiting_requests, when_full)

    @classmethod
    def from_llm(
        cls, llm: LLM, *, max_waiting_requests: int | None = 1024, when_full: Literal["wait", "refuse"] = "wait"
    ) -> AsyncLLM:
        """Serve a loaded LLM, which must not be used directly any more; closing this closes it."""
        made = cls.__new__(cls)
        made._set_up(lambda: llm, max_waiting_requests, when_full)
        return made

    def _set_up(self, load: Callable[[], LLM], most: int | None, when_full: str) -> None:
        self._load = load
        self._slots = WaitingSlots(most, when_full)
        self._worker: EngineWorker | None = None
        self._ready: asyncio.Future[LLM] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._ids = itertools.count()
        self._streams: dict[str, set[RequestStream]] = {}

    # Life and health

    async def start(self) -> None:
        """Load the model, off the event loop; later calls wait for the same loading. Raises as `LLM` does."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineDeadError("this AsyncLLM is closed; create a new one")
        if self._worker is None:
            self._loop = loop
            load = self._load
            self._worker = EngineWorker(lambda: _shareable(load()), loop)
            weakref.finalize(self, self._worker.stop).atexit = False
            self._ready = asyncio.wrap_future(self._worker.ready, loop=loop)  # type: ignore[arg-type]
            self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        elif loop is not self._loop:
            raise ConfigError("this AsyncLLM belongs to another event loop; create one in each loop that needs one")
        assert self._ready is not None, "a started AsyncLLM has a future for its model"
        await asyncio.shield(self._ready)

    async def close(self, *, drain: bool = False) -> None:
        """Stop and free the model's memory. Open requests end with finish_reason "abort".

        drain: take no more requests, but finish those that are open first.
        """
        self._closed = True
        if self._worker is not None:
            self._worker.stop(drain=drain)
            await asyncio.shield(asyncio.wrap_future(self._worker.closed))

    def shutdown(self, timeout: float | None = None) -> None:
        """As `close`, for callers without a running event loop: blocks until the memory is free."""
        self._closed = True
        if self._worker is not None:
            self._worker.stop()
            self._worker.join(timeout)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_running(self) -> bool:
        """True from `start` on until it is closed or has failed."""
        return self._worker is not None and self._worker.running and not self._closed

    @property
    def is_stopped(self) -> bool:
        """Not running: not started yet, closed, or failed."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """True once the engine has failed."""
        return self._worker is not None and self._worker.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """Why no request is taken; `__cause__` is the failure."""
        return EngineDeadError("this AsyncLLM was not started") if self._worker is None else self._worker.error()

    async def wait_closed(self) -> None:
        """Return once the engine's thread has ended: it was closed, or it has failed (see `errored`)."""
        if self._worker is not None:
            await asyncio.shield(asyncio.wrap_future(self._worker.closed))

    async def check_health(self, timeout: float = 30.0) -> None:
        """Return if the engine's thread answers between two steps within `timeout` seconds.

        Raises EngineDeadError if it has failed or was closed, QEngineError if a step takes longer.
        """
        try:
            await asyncio.wait_for(self.call(lambda engine: None), timeout)
        except asyncio.TimeoutError:
            raise QEngineError(f"the engine has not finished a step within {timeout:g} s") from None

    # Requests

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields a RequestOutput whenever there is news, the last one with `finished` set.

        prompt: as for `LLM.generate`, or a `Prompt` whose token ids are known. sampling_params: None for the model's
        defaults. request_id: a label for `abort`; two requests may share one. priority: lower is served first.
        output_kind: all so far (the default), what is new since the last output, or the result alone. A slow consumer
        gets several steps in one output. tap: gets outputs in place of the generator, with less work for each; see
        `Tap`.

        Closing the generator, or cancelling the task that iterates it, ends the request: its blocks are free before
        the next step. Raises RequestError (this request only), QueueFullError, EngineDeadError.
        """

        async def read() -> Prompt:
            if isinstance(prompt, Prompt):
                return prompt
            items = split_prompts(prompt)
            if len(items) != 1:
                raise RequestError(f"generate takes one prompt, got {len(items)}; call it once for each, concurrently")
            return await self._read(items[0])

        return self._run(read, sampling_params, request_id, priority, output_kind, tap)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; as `generate`. template_options: `render_chat`'s, such as tools."""

        async def read() -> Prompt:
            conversations = split_conversations(messages)
            if len(conversations) != 1:
                raise RequestError(f"chat takes one conversation, got {len(conversations)}; call it once for each")
            text = render_chat(conversations[0], self.tokenizer, **template_options)
            return Prompt(encode(text, self.tokenizer, add_special_tokens=False), text)

        return self._run(read, sampling_params, request_id, priority, output_kind)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the requests of this label, or of these; when it returns, their blocks are free.

        Their generators yield what there is, with finish_reason "abort". Unknown labels are ignored: the request may
        just have ended.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        streams = [stream for one in ids for stream in self._streams.get(one, ())]
        if streams and self._worker is not None:
            await asyncio.shield(asyncio.wrap_future(self._worker.abort(streams)))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """`function(engine)`, run in the engine's thread between two steps. Keep it short: everybody waits for it."""
        await self.start()
        assert self._worker is not None, "a started AsyncLLM has a worker"
        return await asyncio.wrap_future(self._worker.call(function))

    @property
    def num_waiting_requests(self) -> int:
        """Requests submitted that have no token yet."""
        return self._slots.taken

    @property
    def num_open_requests(self) -> int:
        """Requests whose generators are in use."""
        return sum(len(streams) for streams in self._streams.values())

    @property
    def stats(self) -> EngineStats | None:
        """The engine's counts after one of its last steps, at once; None before the model is loaded."""
        return None if self._worker is None else self._worker.stats

    # The model

    @property
    def llm(self) -> LLM:
        """The loaded model's synchronous front, to read from. Raises QEngineError before `start` has returned."""
        if self._ready is None or not self._ready.done():
            raise QEngineError("this AsyncLLM was not started; call `await llm.start()` first")
        return self._ready.result()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None if none was loaded."""
        return self.llm._tokenizer

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises QEngineError if none was loaded."""
        await self.start()
        return self.llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return self.llm.get_default_sampling_params()

    async def _read(self, item: Any) -> Prompt:
        """The prompt's token ids; long texts are tokenized in a thread."""
        text = item.get("prompt") if isinstance(item, dict) else item
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return await asyncio.to_thread(read_prompt, item, self.tokenizer)
        return read_prompt(item, self.tokenizer)

    async def _run(
        self,
        read: Callable[[], Awaitable[Prompt]],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        kind: RequestOutputKind | None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.start()
        prompt = await read()
        assert self._worker is not None, "a started AsyncLLM has a worker"
        if params is None:
            params = self.get_default_sampling_params()
        elif not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r} is not allowed; give SamplingParams")
        name = f"async-{next(self._ids)}" if request_id is None else request_id
        kind = kind or RequestOutputKind.CUMULATIVE
        await self._slots.take()
        stream = RequestStream(name, prompt.text, params.n, kind, self._slots.give, tap)
        self._streams.setdefault(name, set()).add(stream)
        try:
            self._worker.submit(stream, prompt, params, priority)
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not stream.finished:
                self._worker.abort([stream])
            stream.release()
            self._streams[name].discard(stream)
            if not self._streams[name]:
                del self._streams[name]


def _shareable(llm: LLM) -> LLM:
    """`llm`, with a tokenizer that two threads may use: its first call changes its settings, later ones do not."""
    if llm._tokenizer is not None:
        encode("a", llm._tokenizer)
        encode("a", llm._tokenizer, add_special_tokens=False)
    return llm

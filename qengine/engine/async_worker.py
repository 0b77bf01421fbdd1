"""The thread that owns an Engine: takes commands from an event loop, steps, reports back. It sleeps while idle.

Everything that touches the engine, loading and closing included, happens in this one thread. A command crosses to it
once, through a mailbox that is emptied before each step. Reports of a step cross back together, in one callback, and if
the loop is busy those of several steps do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from qengine.engine.async_commands import (
    Abort,
    Call,
    Command,
    EngineDeadError,
    LoopClosed,
    Served,
    Stop,
    Submit,
    resolve,
)
from qengine.engine.async_delivery import Delivery, Report
from qengine.engine.async_stream import Progress, RequestStream
from qengine.engine.engine import Engine
from qengine.engine.prompts import Prompt
from qengine.engine.request import Request
from qengine.engine.stats import EngineStats
from qengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
EXIT_SECONDS = 10
"""How long the interpreter's exit waits for a thread to end its step and free its memory."""
STATS_SECONDS = 0.05
"""How old the published counts may be while steps follow one another: to make them takes longer the more wait."""

IDLE_SECONDS = 0.5
"""How long nothing has come before the pause is used to warm up: captures, which would else hold up the first steps of
each shape. A request that comes then waits for one of them, some 0.1 s."""
COMPILE_SECONDS = 1.0
"""How often it looks, while there is nothing else to do, whether a grammar takes too long to compile."""


@dataclass
class _Open:
    """A request in the engine, and how many logprobs of each of its sequences were reported."""

    stream: RequestStream
    seen_logprobs: list[int]
    reported: bool = False


class EngineWorker:
    """Runs `load()`'s engine for the streams of one event loop.

    ready: resolves to what was loaded, or to why it could not be. closed: resolves when the thread is about to end and
    the memory is free. dead_error: set once the engine has failed. stats: the engine's counts after one of the last
    steps, to be read from any thread; None until the engine runs.
    """

    def __init__(self, load: Callable[[], Served], loop: asyncio.AbstractEventLoop) -> None:
        self.ready: Future[Served] = Future()
        self.closed: Future[None] = Future()
        self.dead_error: EngineDeadError | None = None
        self.stats: EngineStats | None = None
        self._stats_due = 0.0
        self._load = load
        self._wake = threading.Condition()
        self._inbox: deque[Command] = deque()
        self._ended = False
        self._draining = False
        self._poked = False
        self._warm = False
        self._open: dict[Request, _Open] = {}
        self._requests: dict[RequestStream, Request] = {}
        self._delivery = Delivery(loop)
        self._thread = threading.Thread(target=self._main, name="qengine-engine", daemon=True)
        _workers.add(self)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it still takes requests."""
        return not self._ended

    # Called from other threads: the event loop's, mostly.

    def submit(self, stream: RequestStream, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        """Queue a request; its reports go to `stream`. Raises EngineDeadError."""
        if not self._post(Submit(stream, prompt, params, priority)):
            raise self.error()

    def abort(self, streams: list[RequestStream]) -> Future[None]:
        """End requests before the next step; resolves when their blocks are free."""
        done: Future[None] = Future()
        if not self._post(Abort(streams, done)):
            done.set_result(None)
        return done

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Run `function(engine)` in the engine's thread, between two steps. Raises EngineDeadError."""
        done: Future[Any] = Future()
        if not self._post(Call(function, done)):
            raise self.error()
        return done

    def stop(self, *, drain: bool = False) -> None:
        """Take no more requests and end: at once, or (drain) when those that are open are finished."""
        self._post(Stop(drain))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def error(self) -> EngineDeadError:
        """A fresh exception that says why no request is taken."""
        if self.dead_error is None:
            return EngineDeadError("this AsyncLLM is closed; create a new one")
        fresh = EngineDeadError(str(self.dead_error))
        fresh.__cause__ = self.dead_error.__cause__
        return fresh

    def _post(self, command: Command) -> bool:
        with self._wake:
            if self._ended:
                return False
            self._inbox.append(command)
            self._wake.notify()
        return True

    # All below runs in the engine's thread.

    def _main(self) -> None:
        served: Served | None = None
        failure: BaseException | None = None
        try:
            served = self._load()
        except BaseException as error:
            self._shut(None, error)
            self.ready.set_exception(error)
            self.closed.set_result(None)
            return
        self.ready.set_result(served)
        served.engine.compiling.on_ready = self._poke
        served.engine.before_wait(self._delivery.release)
        try:
            with contextlib.suppress(LoopClosed):
                self._serve(served.engine)
        except BaseException as error:  # whatever it is, open requests must be told
            failure = error
        self._shut(served, failure)
        self.closed.set_result(None)

    def _serve(self, engine: Engine) -> None:
        while True:
            rest = self._rest(engine)
            if not engine.can_step:
                self._delivery.release()
            if rest != 0 or time.monotonic() >= self._stats_due:
                self.stats, self._stats_due = engine.stats(), time.monotonic() + STATS_SECONDS
            command = self._next_command(rest)
            if command is None and rest and not engine.has_unfinished():
                self._warm_up(engine)
            while command is not None:
                if not self._obey(engine, command):
                    return
                command = self._next_command(0)
            if engine.can_step:
                self._hand_on(engine, [self._report(r) for r in engine.step() if r in self._open])
            elif self._draining and not engine.has_unfinished():
                return

    def _hand_on(self, engine: Engine, reports: list[Report]) -> None:
        """Send the reports of a step: at once, or, where the engine runs ahead, when it has launched the next step.

        The event loop's work for them would else hold that launch up, as only one of the two threads has Python. First
        tokens and ends, which alone have the prompt's ids, go at once, and before the others.
        """
        reports.sort(key=lambda report: report[1].prompt_token_ids is None)
        if engine.runs_ahead and reports and reports[0][1].prompt_token_ids is None:
            self._delivery.hold(reports)
        else:
            self._delivery.send(reports)

    def _rest(self, engine: Engine) -> float | None:
        """Seconds to wait for a command: none if there is a step to compute, None for ever if nothing is to be done."""
        if engine.can_step:
            return 0
        if engine.has_unfinished():
            return COMPILE_SECONDS
        return 0 if self._draining else None if self._warm else IDLE_SECONDS

    def _warm_up(self, engine: Engine) -> None:
        """Use a pause to do what would hold up steps to come, until a command comes."""
        try:
            self._warm = engine.warm_up(lambda: bool(self._inbox))
        except Exception:  # of a shape that may never be needed
            logger.warning("the engine could not be warmed up", exc_info=True)
            self._warm = True

    def _next_command(self, rest: float | None) -> Command | None:
        """What came next, or None; waits for it, or for a grammar, for up to `rest` seconds."""
        with self._wake:
            if rest != 0 and not self._inbox and not self._poked:
                self._wake.wait(rest)
            self._poked = False
            return self._inbox.popleft() if self._inbox else None

    def _poke(self) -> None:
        """Called in any thread when a grammar is ready."""
        with self._wake:
            self._poked = True
            self._wake.notify()

    def _obey(self, engine: Engine, command: Command) -> bool:
        """Carry out a command; False ends the thread."""
        if isinstance(command, Submit):
            self._add(engine, command)
        elif isinstance(command, Abort):
            try:
                for request in [self._requests[stream] for stream in command.streams if stream in self._requests]:
                    engine.abort(request)
                    self._delivery.send([self._report(request)])
            finally:
                resolve(command.done, None)
        elif isinstance(command, Call):
            try:
                resolve(command.done, command.function(engine))
            except Exception as error:
                resolve(command.done, None, error)
        elif command.drain:
            self._draining = True
        else:
            return False
        return True

    def _add(self, engine: Engine, command: Submit) -> None:
        stream, prompt = command.stream, command.prompt
        try:
            if self._draining:
                raise EngineDeadError("this AsyncLLM is closing; create a new one")
            request = engine.add_request(
                prompt.token_ids,
                command.params,
                request_id=stream.request_id,
                prompt=prompt.text,
                cache_salt=prompt.cache_salt,
                streamed=True,
                priority=command.priority,
            )
        except Exception as error:  # of this request alone: the engine has not changed
            self._delivery.send([(stream, Progress(error=error))])
            return
        self._open[request] = _Open(stream, [0] * len(request.outputs))
        self._requests[stream] = request

    def _report(self, request: Request) -> Report:
        """What an open request gained, for its stream; it is forgotten if it has ended."""
        entry, finished = self._open[request], request.finished
        progress = Progress(request.take_deltas(), finished=finished, error=request.error)
        for index, output in enumerate(request.outputs):
            if output.logprobs is not None and len(output.logprobs) > entry.seen_logprobs[index]:
                progress.logprobs.append((index, output.logprobs[entry.seen_logprobs[index] :]))
                entry.seen_logprobs[index] = len(output.logprobs)
        if finished or not entry.reported:
            result = request.result()
            progress.prompt_token_ids = list(request.prompt_token_ids)
            progress.prompt_logprobs = None if result.prompt_logprobs is None else list(result.prompt_logprobs)
            progress.metrics = replace(request.metrics)
            entry.reported = True
        if finished:
            del self._open[request], self._requests[entry.stream]
        return entry.stream, progress

    def _shut(self, served: Served | None, failure: BaseException | None) -> None:
        """Tell everyone who still waits, then free the memory."""
        if failure is not None:
            self.dead_error = EngineDeadError(
                f"the engine failed and takes no more requests: {type(failure).__name__}: {failure}; create a new one"
            )
            self.dead_error.__cause__ = failure
            traceback.clear_frames(failure.__traceback__)  # their locals would keep the model's memory
        with self._wake:
            self._ended = True
            rest, self._inbox = list(self._inbox), deque()
        last: list[Report] = []
        for request in list(self._open):
            if failure is None and served is not None:
                served.engine.abort(request)
                last.append(self._report(request))
            else:
                last.append((self._open[request].stream, Progress(error=self.error())))
        self._open.clear()
        self._requests.clear()
        last += self._refuse(rest)
        with contextlib.suppress(LoopClosed):
            self._delivery.send(last)
        if served is not None:
            try:
                served.close()
            except Exception as error:  # after a failure of the device this fails too; the thread ends all the same
                logger.warning("the engine could not be closed: %s", error)

    def _refuse(self, commands: list[Command]) -> list[Report]:
        reports: list[Report] = []
        for command in commands:
            if isinstance(command, Submit):
                reports.append((command.stream, Progress(error=self.error())))
            elif isinstance(command, Abort):
                resolve(command.done, None)
            elif isinstance(command, Call):
                resolve(command.done, None, self.error())
        return reports


_workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread must not be inside the device's driver when the interpreter goes."""
    for worker in list(_workers):
        worker.stop()
    for worker in list(_workers):
        worker.join(EXIT_SECONDS)

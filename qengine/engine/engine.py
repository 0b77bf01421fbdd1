"""The engine: requests in, tokens out. `step` is schedule, run, process; one thread calls it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from qengine.config import StructuredConfig
from qengine.engine.block_manager import BlockManager
from qengine.engine.grammar_queue import GrammarQueue, outcome
from qengine.engine.interrupts import uninterrupted
from qengine.engine.limits import Limits, bad_word_ids, check_priority, salt_bytes
from qengine.engine.request import Request, SequenceOutput, as_logprobs
from qengine.engine.sampler import SampleRow
from qengine.engine.scheduler import Plan, Scheduler
from qengine.engine.sequence import Sequence
from qengine.engine.stats import EngineStats, engine_stats
from qengine.engine.step import StepItem, StepResult, StepRunner
from qengine.engine.step_ahead import Flight, StepAhead
from qengine.errors import QEngineError, RequestError
from qengine.outputs import RequestMetrics, StreamDelta
from qengine.sampling_params import SamplingParams
from qengine.structured.grammars import GrammarStore

WAIT_SECONDS = 0.1
"""How long a step waits at a time where nothing but grammars is being worked on."""


class Engine:
    """Continuous batching over a StepRunner.

    Owns the requests; the scheduler owns the queues, the block manager the block ids, the runner the tensors.
    tokenizer: None if there is none. grammars: for structured output. seed: base of the seeds of requests without one.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        limits: Limits,
        tokenizer: Any = None,
        *,
        grammars: GrammarStore | None = None,
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._runner = runner
        self._tokenizer = tokenizer
        self._grammars = grammars or GrammarStore(tokenizer, limits.sample_vocab, limits.eos_ids, StructuredConfig())
        self.compiling = GrammarQueue()
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()
        self._seeds = random.Random(seed)
        self._owner: dict[int, tuple[Request, SequenceOutput]] = {}
        self._token_texts: dict[int, str] = {}
        self._steps = StepAhead(runner, scheduler, self._items, self._row, ahead=limits.switch_length is None)

    @property
    def blocks(self) -> BlockManager:
        """The block manager."""
        return self.scheduler.blocks

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """The request as it would run: final prompt ids and a copy of the parameters. Raises RequestError."""
        params = params.clone()
        params.verify()
        self.limits.check_params(params, has_tokenizer=self._tokenizer is not None)
        return self.limits.check_prompt(prompt_token_ids, params), params

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        cache_salt: str | None = None,
        streamed: bool = False,
        priority: int = 0,
    ) -> Request:
        """Queue a request. Raises RequestError, with nothing changed, if it cannot be served.

        request_id is a label: two requests may have the same. cache_salt: only prompts with the same salt share
        prefix cache blocks. streamed: `Request.take_deltas` will be called. priority: lower is served first, where
        scheduling_policy="priority".
        """
        token_ids, params = self.check_request(prompt_token_ids, params)
        salt = salt_bytes(cache_salt)
        check_priority(priority, self.scheduler.policy)
        compiled = self._compiled(params)
        arrival, now = next(self._arrivals), time.monotonic()
        request = Request(
            request_id=str(arrival) if request_id is None else request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            metrics=RequestMetrics(arrival_time=now),
            streamed=streamed,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        bad_words = bad_word_ids(self._tokenizer, params.bad_words or (), self.limits.sample_vocab)
        place = self.scheduler.rank(priority, now), arrival
        sequences = [self._sequence(request, (*place, index), priority, salt) for index in range(params.n)]
        for seq in sequences:
            seq.siblings = sequences
            row = SampleRow(
                params, seq.token_ids, seq.num_prompt, seed, seq.index, self.limits.banned_ids(params), bad_words
            )
            output = SequenceOutput(seq, row, self._tokenizer, eos_ids=self.limits.eos_ids, max_len=self.limits.max_len)
            request.outputs.append(output)
        if compiled is None or compiled.done():
            self._admit(request, None if compiled is None else compiled.result())
        else:
            self.compiling.add(request, compiled, self._grammars.timeout)
        return request

    def has_unfinished(self) -> bool:
        """True while any request runs or waits."""
        return self.scheduler.has_unfinished() or len(self.compiling) > 0

    @property
    def can_step(self) -> bool:
        """True if a step need not wait for a grammar: `compiling.on_ready` tells when that may have come true."""
        return self.scheduler.has_unfinished() or self.compiling.ready

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got tokens, or ended, in it. Empty if there is nothing to do.

        Where all requests wait for grammars, it waits for one, and for 0.1 s at most. Ctrl-C waits for the step's end;
        a second one cuts it short.
        """
        if not self.can_step:
            self.compiling.wait(WAIT_SECONDS)
        with uninterrupted():
            return self._admit_compiled() + (self._steps.step(self._process) or [])

    @property
    def runs_ahead(self) -> bool:
        """Whether a step launches the next one before it waits for its own tokens."""
        return self._steps.runs_ahead

    def before_wait(self, function: Callable[[], None]) -> None:
        """Where it runs ahead: have `function()` called in each step once there is nothing to do but wait."""
        self._steps.before_wait = function

    def abort(self, request: Request) -> None:
        """End a request at once, wherever it is; its blocks are free when this returns."""
        with uninterrupted():
            self.compiling.remove(request)
            for output in request.outputs:
                if output.finish_reason is None:
                    self._end(request, output.seq)
                    delta = output.abort()
                    if request.streamed:
                        request.deltas.append(delta)

    def stream(self, request: Request) -> Iterator[StreamDelta]:
        """What a streamed request gains, step by step; the others advance with it. Closing or dropping it aborts."""
        deltas = self._stream(request)
        next(deltas)  # a generator that never began would not abort when it is dropped
        return deltas

    def _stream(self, request: Request) -> Generator[StreamDelta]:
        try:
            yield StreamDelta(0, "")
            while True:
                yield from request.take_deltas()
                if request.error is not None:
                    raise request.error
                if request.finished and not request.deltas:
                    return
                self.step()
        finally:
            self.abort(request)

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Compile and capture now what the first steps would else be held up by: on a GPU some seconds.

        stop: asked about ten times a second; True ends it, and a later call goes on. Returns whether all is done.
        Raises QEngineError while requests are under way.
        """
        if self.has_unfinished():
            raise QEngineError("warm_up while requests are under way; call it before the first, or when all are done")
        return self._runner.warm_up(stop)

    def close(self) -> None:
        """Abort everything and let go of the model and its cache."""
        owned = {id(r): r for r, _ in self._owner.values()}
        for request in [*owned.values(), *self.compiling.requests()]:
            self.abort(request)
        self._grammars.close()
        self._runner.close()
        del self._runner, self._steps

    def stats(self) -> EngineStats:
        """Counts since the start, and what runs and waits now."""
        return replace(engine_stats(self.scheduler), compiling=self.compiling.num_sequences)

    def check_integrity(self) -> None:
        """Raise AssertionError if the engine's books contradict each other. For tests."""
        self.scheduler.check_integrity()
        queued = {seq.id for seq in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._owner), f"queued sequences {queued} but owned ones {set(self._owner)}"

    def _sequence(self, request: Request, order: tuple[float, int, int], priority: int, salt: bytes) -> Sequence:
        prompt = request.prompt_token_ids
        return Sequence(
            id=next(self._seq_ids),
            order=order,
            token_ids=list(prompt),
            num_prompt=len(prompt),
            salt=salt,
            read_prefix_cache=request.params.prompt_logprobs is None,
            priority=priority,
        )

    def _row(self, seq: Sequence) -> SampleRow | None:
        """What the sampler knows of a sequence; None if it has ended."""
        owner = self._owner.get(seq.id)
        return None if owner is None else owner[1].row

    def _items(self, plan: Plan) -> list[StepItem]:
        """The plan as the runner takes it."""
        now, items = time.monotonic(), []
        for chunk in plan.chunks:
            request, output = self._owner[chunk.seq.id]
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            item = StepItem(
                seq_id=chunk.seq.id,
                token_ids=chunk.seq.token_ids,
                start=chunk.start,
                end=chunk.end,
                block_table=self.blocks.table(chunk.seq.id),
            )
            if chunk.samples:
                item.rows = [output.row, *(self._owner[seq.id][1].row for seq in chunk.forks)]
            if request.prompt_logprobs is not None:
                # A chunk computed anew after a preemption scores only what is missing.
                first = max(chunk.start, len(request.prompt_logprobs) - 1)
                item.scored = range(first, max(first, min(chunk.end, chunk.seq.num_prompt - 1)))
                item.num_logprobs = request.params.prompt_logprobs or 0
            items.append(item)
        return items

    def _process(self, flight: Flight, result: StepResult) -> list[Request]:
        """Record prompt logprobs, append sampled tokens, end what is finished."""
        touched: dict[int, Request] = {}
        for seq_id, scores in result.prompt_logprobs.items():
            if seq_id not in self._owner:  # aborted meanwhile
                continue
            request = self._owner[seq_id][0]
            assert request.prompt_logprobs is not None, "prompt logprobs arrived that were not asked for"
            request.prompt_logprobs += [as_logprobs(item, self._token_text) for item in scores]
        samples = result.samples
        for i, seq in enumerate(flight.sampled):
            if seq.id not in self._owner:  # ended meanwhile, or with a sibling whose logits were unusable
                continue
            request, output = self._owner[seq.id]
            touched[id(request)] = request
            if not samples.valid[i]:
                self._fail(request)
                continue
            if output.logprobs is not None and samples.logprobs[i] is not None:
                output.add_logprobs(samples.logprobs[i], self._token_text)  # type: ignore[arg-type]
            delta = output.append(samples.token_ids[i])
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = time.monotonic()
            if request.streamed:
                request.deltas.append(delta)
            if output.finish_reason is not None:
                self._end(request, seq)
            elif self.limits.switch_length is not None and len(seq.token_ids) == self.limits.switch_length + 1:
                self.scheduler.restart(seq)
        return list(touched.values())

    def _compiled(self, params: SamplingParams) -> Future[Any] | None:
        """The future of the request's grammar, if it has one. Raises RequestError for one that is known to be wrong."""
        if params.structured_outputs is None:
            return None
        compiled = self._grammars.request(params.structured_outputs)
        error = outcome(compiled)[1] if compiled.done() else None
        if error is not None:
            raise error
        return compiled

    def _admit(self, request: Request, grammar: Any) -> None:
        """Queue a request's sequences, each with a matcher of its grammar, if there is one."""
        for output in request.outputs:
            if grammar is not None:
                output.row.attach(self._grammars.matcher(grammar))
            self._owner[output.seq.id] = (request, output)
            self.scheduler.add(output.seq)

    def _admit_compiled(self) -> list[Request]:
        """Queue requests whose grammars are ready; returns those that have none and end with an error."""
        failed = []
        for request, grammar, error in self.compiling.take():
            if error is None:
                self._admit(request, grammar)
            else:
                request.error = error
                self.abort(request)
                failed.append(request)
        return failed

    def _end(self, request: Request, seq: Sequence) -> None:
        if seq.id in self._owner:  # else its grammar is still being compiled
            self.scheduler.finish(seq)
            del self._owner[seq.id]
        seq.forget_unknown()
        if all(output.seq.id not in self._owner for output in request.outputs):
            request.metrics.finished_time = time.monotonic()

    def _fail(self, request: Request) -> None:
        """End a request whose logits are all nan or infinite, or all forbidden; the others go on."""
        if request.params.structured_outputs is not None and request.params.allowed_token_ids is not None:
            request.error = RequestError(
                f"request {request.request_id}: no token is allowed by both structured_outputs and allowed_token_ids; "
                "leave one of them out"
            )
            self.abort(request)
            return
        request.error = QEngineError(
            f"request {request.request_id}: the model gave no finite logit (nan or inf); the weights or the dtype "
            "are at fault: try dtype='float32' or 'bfloat16', and check the checkpoint with `qengine inspect`"
        )
        self.abort(request)

    def _token_text(self, token: int) -> str | None:
        """The text of a single token, remembered."""
        if self._tokenizer is None:
            return None
        if token not in self._token_texts:
            self._token_texts[token] = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return self._token_texts[token]

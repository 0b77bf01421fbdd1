"""The engine: requests in, tokens out. `step` is schedule, run, process; one thread calls it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from qengine.engine.block_manager import BlockManager
from qengine.engine.interrupts import uninterrupted
from qengine.engine.limits import Limits
from qengine.engine.request import Request, SequenceOutput, as_logprobs
from qengine.engine.sampler import SampleRow
from qengine.engine.scheduler import Plan, Scheduler
from qengine.engine.sequence import Sequence
from qengine.engine.stats import EngineStats, engine_stats
from qengine.engine.step import Launched, StepItem, StepResult, StepRunner
from qengine.errors import QEngineError, RequestError
from qengine.outputs import RequestMetrics, StreamDelta
from qengine.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1
"""Largest absolute priority: differences of time still count beside it."""


@dataclass(frozen=True)
class _Flight:
    """A step under way. sampled: the sequences that get a token from it, in the order of its samples."""

    plan: Plan
    step: Launched
    sampled: list[Sequence]


class Engine:
    """Continuous batching over a StepRunner.

    Owns the requests; the scheduler owns the queues, the block manager the block ids, the runner the tensors.
    tokenizer: None if there is none. seed: base of the seeds of requests without one.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, limits: Limits, tokenizer: Any = None, *, seed: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._runner = runner
        self._tokenizer = tokenizer
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()
        self._seeds = random.Random(seed)
        self._owner: dict[int, tuple[Request, SequenceOutput]] = {}
        self._token_texts: dict[int, str] = {}
        self._ahead: _Flight | None = None

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
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt={cache_salt!r} is not allowed; give a string")
        check_priority(priority, self.scheduler.policy)
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
        salt = (cache_salt or "").encode()
        place = self.scheduler.rank(priority, now), arrival
        sequences = [self._sequence(request, (*place, index), priority, salt) for index in range(params.n)]
        for seq in sequences:
            seq.siblings = sequences
            row = SampleRow(
                params, seq.token_ids, seq.num_prompt, seed, seq.index, self.limits.banned_ids(params), bad_words
            )
            output = SequenceOutput(seq, row, self._tokenizer, eos_ids=self.limits.eos_ids, max_len=self.limits.max_len)
            request.outputs.append(output)
            self._owner[seq.id] = (request, output)
            self.scheduler.add(seq)
        return request

    def has_unfinished(self) -> bool:
        """True while any request runs or waits."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got tokens, or ended, in it. Empty if there is nothing to do.

        Ctrl-C waits for the step's end; a second one cuts it short.
        """
        with uninterrupted():
            return self._step()

    def _step(self) -> list[Request]:
        """Process the step under way, or one launched now; before that, launch the next, so that the device goes on."""
        current, self._ahead = self._ahead or self._launch(), None
        if current is None:
            return []
        failure: BaseException | None = None
        if self._runner.overlaps and self._can_run_ahead(current):
            try:
                self._ahead = self._launch()
            except BaseException as error:
                failure = error  # what the step under way gives is recorded first
        touched = self._finish(current)
        if failure is not None:
            raise failure
        return touched

    def _launch(self) -> _Flight | None:
        """Schedule and launch a step; None if there is nothing to compute."""
        if not self.scheduler.has_unfinished():
            return None
        plan = self.scheduler.schedule()
        if not plan.chunks and not plan.swap:
            return None
        sampled = [seq for chunk in plan.chunks if chunk.samples for seq in (chunk.seq, *chunk.forks)]
        try:
            step = self._runner.launch(self._items(plan), plan.copies, plan.swap)
        except BaseException:
            # Out of memory or Ctrl-C: what the cache holds now is unknown, so these are computed anew.
            self.scheduler.fail(plan)
            raise
        self.scheduler.advance(plan)
        for seq in sampled:
            seq.expect()
        return _Flight(plan, step, sampled)

    def _can_run_ahead(self, current: _Flight) -> bool:
        """Whether the next step can be put together before this one's tokens are known."""
        if self.limits.switch_length is not None:
            return False
        owned = (self._owner[seq.id][1].row for seq in current.sampled if seq.id in self._owner)
        return not any(row.bad_words for row in owned)

    def _finish(self, flight: _Flight) -> list[Request]:
        """Wait for a step and process what it gives."""
        try:
            result = flight.step.result()
        except BaseException:
            self._abandon([flight, *([self._ahead] if self._ahead is not None else [])])
            self._ahead = None
            raise
        self.scheduler.commit(flight.plan)
        return self._process(flight, result)

    def _abandon(self, flights: list[_Flight]) -> None:
        """Take back steps that failed: their sequences are computed anew."""
        for flight in flights:
            for seq in flight.sampled:
                seq.forget_unknown()
        for flight in flights:
            self.scheduler.fail(flight.plan)

    def abort(self, request: Request) -> None:
        """End a request at once, wherever it is; its blocks are free when this returns."""
        with uninterrupted():
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

    def close(self) -> None:
        """Abort everything and let go of the model and its cache."""
        for request in list({id(r): r for r, _ in self._owner.values()}.values()):
            self.abort(request)
        self._ahead = None
        self._runner.close()
        del self._runner

    def stats(self) -> EngineStats:
        """Counts since the start, and what runs and waits now."""
        return engine_stats(self.scheduler)

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

    def _process(self, flight: _Flight, result: StepResult) -> list[Request]:
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

    def _end(self, request: Request, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        seq.forget_unknown()
        del self._owner[seq.id]
        if all(output.seq.id not in self._owner for output in request.outputs):
            request.metrics.finished_time = time.monotonic()

    def _fail(self, request: Request) -> None:
        """End a request whose logits are all nan or infinite; the others go on."""
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


def check_priority(priority: Any, policy: str) -> None:
    """Raise RequestError for a priority that is no number, or that nothing would look at."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(f"priority={priority!r} is not allowed; give a whole number within +-{MAX_PRIORITY}")
    if priority and policy != "priority":
        raise RequestError(
            f"priority={priority} needs scheduling_policy='priority'; this engine serves requests in the order of "
            f"arrival (scheduling_policy={policy!r})"
        )


def bad_word_ids(tokenizer: Any, words: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it stands at a text's start and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and max(ids) < vocab_size:
                found[ids] = None
    return tuple(found)

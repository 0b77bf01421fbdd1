"""One request and the growing output of each of its sequences: text, token ids, logprobs, the reason of its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qengine.engine.detokenizer import IncrementalDetokenizer
from qengine.engine.sampler import SampleRow, TokenLogprobs
from qengine.engine.sequence import Sequence
from qengine.engine.stop_strings import StopStrings
from qengine.errors import QEngineError
from qengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta
from qengine.sampling_params import SamplingParams

DecodeOne = Callable[[int], "str | None"]


class SequenceOutput:
    """Turns one sequence's tokens into text and decides when it ends."""

    def __init__(self, seq: Sequence, row: SampleRow, tokenizer: Any, *, eos_ids: frozenset[int], max_len: int) -> None:
        params = row.params
        self.seq = seq
        self.row = row
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._ends = frozenset() if params.ignore_eos else eos_ids
        self._max_output = min(max_len - seq.num_prompt, params.max_tokens or max_len)
        seq.limit = seq.num_prompt + self._max_output
        self._stops = StopStrings(params.stop or (), include=params.include_stop_str_in_output)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                seq.token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def append(self, token: int) -> StreamDelta:
        """Add a sampled token: text, stop conditions, length."""
        count = self.seq.learn(token)
        ended = self._grammar_ended()
        may_stop = count >= self._params.min_tokens
        if may_stop and token in (self._params.stop_token_ids or ()) and token not in self._ends:
            self.finish_reason, self.stop_reason = "stop", token
        elif ended or (may_stop and token in self._ends):
            self.finish_reason = "stop"
        shown = self.finish_reason is None or self._params.include_stop_str_in_output
        text = self._text([token] if shown else [], may_stop)
        if self.finish_reason is None and count >= self._max_output:
            self.finish_reason = "length"
            text += self._rest(check=may_stop)
        elif self.finish_reason is not None and self._stops.matched is None:
            text += self._rest(check=False)
        self.text += text
        return StreamDelta(self.seq.index, text, [token], self.finish_reason, self.stop_reason)

    def _grammar_ended(self) -> bool:
        """True if the row's grammar, if it has one, allows nothing more."""
        if self.row.matcher is None:
            return False
        self.row.matcher.follow(self.seq.token_ids, self.seq.num_prompt)
        return self.row.matcher.ended

    def abort(self) -> StreamDelta:
        """End the sequence where it is."""
        text = self._rest(check=False)
        self.text += text
        self.finish_reason = "abort"
        return StreamDelta(self.seq.index, text, [], "abort", None)

    def add_logprobs(self, item: TokenLogprobs, decode: DecodeOne) -> None:
        """Record the logprobs of the token just sampled; its own comes first in `item`."""
        assert self.logprobs is not None, "logprobs arrived that were not asked for"
        self.logprobs.append(as_logprobs(item, decode))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + item.logprobs[0]

    def completion(self) -> CompletionOutput:
        """The result so far."""
        return CompletionOutput(
            index=self.seq.index,
            text=self.text,
            token_ids=self.seq.output_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _text(self, tokens: list[int], may_stop: bool) -> str:
        if self._detokenizer is None:
            return ""
        return self._push(self._detokenizer.add(tokens), may_stop)

    def _rest(self, *, check: bool) -> str:
        """Text still held back, now that no token follows."""
        if self._detokenizer is None:
            return ""
        text = self._push(self._detokenizer.finish(), check)
        return text if self._stops.matched is not None else text + self._stops.flush()

    def _push(self, text: str, check: bool) -> str:
        text = self._stops.push(text, check=check)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return text


@dataclass(eq=False)
class Request:
    """A prompt, its parameters and its n sequences. error: set instead of a result if the model's output was unusable.

    deltas: what `take_deltas` has not handed out yet; kept only for requests that are streamed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    streamed: bool = False
    outputs: list[SequenceOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    deltas: list[StreamDelta] = field(default_factory=list)
    error: QEngineError | None = None

    @property
    def finished(self) -> bool:
        """True if every sequence has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def take_deltas(self) -> list[StreamDelta]:
        """What was added since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def result(self) -> RequestOutput:
        """The request's output so far."""
        self.metrics.num_preemptions = sum(output.seq.num_preemptions for output in self.outputs)
        self.metrics.num_cached_tokens = max((output.seq.num_cached for output in self.outputs), default=0)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[output.completion() for output in self.outputs],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
        )


def as_logprobs(item: TokenLogprobs, decode: DecodeOne) -> dict[int, Logprob]:
    """token id -> Logprob; the token itself first, then the most likely ones."""
    result: dict[int, Logprob] = {}
    for token, value, rank in zip(item.token_ids, item.logprobs, item.ranks, strict=True):
        if token not in result:
            result[token] = Logprob(value, rank, decode(token))
    return result

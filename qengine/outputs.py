"""What a request returns: plain data, names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """Natural logarithm of one token's probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence.

    token_ids: all generated tokens, the one that ended it included. text: without the stop string (unless asked for).
    cumulative_logprob: sum over the generated tokens, where logprobs were asked for. logprobs: for each generated
    token a mapping token id -> Logprob. finish_reason: "stop" (an end token, stop string or stop token id), "length"
    (max_tokens or the context's end), "abort", or None while running. stop_reason: the stop string or stop token id;
    None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """True if the sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds of time.monotonic(), and counts, of one request.

    num_cached_tokens: prompt tokens taken from the prefix cache. num_preemptions: times a sequence of the request
    gave its blocks up; it got its cache back by copies or by computing it again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A prompt and all that came of it. prompt is None where token ids were given and nothing was decoded."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""
        return self.metrics.num_cached_tokens if self.metrics else 0


@dataclass
class StreamDelta:
    """What one step added to sequence `index` of a streamed request: new text (may be empty) and new token ids.

    finish_reason and stop_reason are set in a sequence's last delta.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

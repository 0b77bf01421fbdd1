"""/v1/completions: prompts of all forms to a whole answer or a stream."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response

from qengine.engine.prompts import Prompt
from qengine.outputs import CompletionOutput, RequestOutput
from qengine.server.answers import EventStream, JSONAnswer
from qengine.server.chunks import Chunks
from qengine.server.errors import ApiError
from qengine.server.generation import Job, Usage, run_pieces, run_whole
from qengine.server.logprobs import completion_logprobs, prompt_logprobs
from qengine.server.prompts import prompt_text, read_prompts
from qengine.server.protocol_completions import CompletionRequest
from qengine.server.request_log import log_request
from qengine.server.sampling import completion_max_tokens, sampling_params
from qengine.server.state import ServerState
from qengine.server.structured import structured_outputs

KIND = "text_completion"


async def create_completion(
    state: ServerState, request: CompletionRequest, endpoint: str = "/v1/completions"
) -> Response:
    """The answer, which does its work while it is sent. Raises ApiError, RequestError."""
    model = state.check_model(request.model)
    if request.suffix:
        raise ApiError("suffix is not supported: text is made from left to right; leave it out", param="suffix")
    prompts = await read_prompts(
        state, request.prompt, add_special_tokens=request.add_special_tokens, cache_salt=request.cache_salt
    )
    writer = CompletionWriter(state, request, prompts)
    params = sampling_params(
        state,
        request,
        prompts=len(prompts),
        max_tokens=1 if writer.prompt_only else completion_max_tokens(state, request.max_tokens),
        logprobs=request.logprobs,
        structured=structured_outputs(request),
    )
    if request.echo and request.logprobs is not None:
        params.prompt_logprobs = request.logprobs
    answer_id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
    job = Job(answer_id, endpoint, model, prompts, params, request.priority or 0)
    log_request(state.settings, job)
    if request.stream:
        return EventStream(state, lambda wire: run_pieces(state, job, CompletionPieces(state, writer, job), wire))
    return JSONAnswer(state, lambda: writer.body(job))


class CompletionWriter:
    """The form of one request's answer. prompt_only: echo with max_tokens=0, nothing is generated."""

    def __init__(self, state: ServerState, request: CompletionRequest, prompts: list[Prompt]) -> None:
        self._state = state
        self.request = request
        self._prompts = prompts
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self.prompt_only = bool(request.echo) and request.max_tokens == 0

    async def body(self, job: Job) -> dict[str, Any]:
        """The whole answer."""
        results = await run_whole(self._state, job)
        usage, choices = Usage(), []
        for index, result in enumerate(results):
            if self.prompt_only:
                _drop_output(result)
            usage.add(result, first=True)
            choices += [self.choice(index, result, output, whole=True) for output in result.outputs]
        return {
            "id": job.id,
            "object": KIND,
            "created": self._state.now(),
            "model": job.model,
            "choices": choices,
            "usage": usage.body(),
        }

    def choice(
        self,
        index: int,
        result: RequestOutput,
        output: CompletionOutput,
        *,
        whole: bool,
        first: bool = True,
        offset: int = 0,
    ) -> dict[str, Any]:
        """A choice of prompt `index`. whole: not a piece of a stream; first: the choice's first piece."""
        request, text, logprobs = self.request, output.text, None
        echo = bool(request.echo) and first
        if echo:
            text = prompt_text(self._state, self._prompts[index], result.prompt_token_ids) + text
        if request.logprobs is not None:
            ids, entries = list(output.token_ids), list(output.logprobs or [])
            if echo and result.prompt_logprobs is not None:
                ids, entries = result.prompt_token_ids + ids, [*result.prompt_logprobs, *entries]  # type: ignore[list-item]
            logprobs = completion_logprobs(
                self._state.texts, ids, entries, request.logprobs, offset=offset, as_ids=self._as_ids
            )
        choice: dict[str, Any] = {
            "index": index * self.request.count + output.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if whole and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._state.texts, result.prompt_logprobs)
        if request.return_token_ids:
            choice["token_ids"] = output.token_ids
            if first:
                choice["prompt_token_ids"] = result.prompt_token_ids
        return choice


class CompletionPieces:
    """The answer piece by piece, as Pieces: the choices of prompt i are i * n and following."""

    def __init__(self, state: ServerState, writer: CompletionWriter, job: Job) -> None:
        request = writer.request
        self._writer = writer
        self._request = request
        self._count = job.params.n
        self._chunks = Chunks(job.id, KIND, state.now(), job.model, include_usage=request.include_usage)
        self._plain = request.logprobs is None and not request.return_token_ids and not request.continuous_usage
        self._usage = Usage()
        self._begun: set[int] = set()
        self._echoed: set[int] = set()
        self._offsets: dict[int, int] = {}

    def of(self, index: int, output: RequestOutput) -> bytes:
        """See Pieces."""
        request, chunks, usage, echoed = self._request, self._chunks, self._usage, self._echoed
        if self._writer.prompt_only:
            _drop_output(output)
        usage.add(output, first=index not in self._begun)
        self._begun.add(index)
        parts = []
        for choice in output.outputs:
            number = index * self._count + choice.index
            if self._plain and choice.finish_reason is None and (not request.echo or number in echoed):
                if choice.text:
                    parts.append(chunks.text(number, choice.text))
                continue
            offset = self._offsets.get(number, 0)
            body = self._writer.choice(index, output, choice, whole=False, first=number not in echoed, offset=offset)
            echoed.add(number)
            if body["logprobs"] is not None:
                self._offsets[number] = offset + sum(map(len, body["logprobs"]["tokens"]))
            parts.append(chunks.choice(body, usage.body() if request.continuous_usage else None))
        return "".join(parts).encode("ascii")

    def last(self) -> bytes:
        """See Pieces."""
        return self._chunks.usage(self._usage.body()).encode("ascii") if self._request.include_usage else b""


def _drop_output(result: RequestOutput) -> None:
    """Leave the prompt alone: the token that the engine needs to be given was not asked for."""
    for output in result.outputs:
        output.text, output.token_ids, output.finish_reason, output.stop_reason = "", [], "length", None
        if output.logprobs is not None:
            output.logprobs = []

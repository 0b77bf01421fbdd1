"""/v1/chat/completions: a conversation to a whole answer or a stream."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response

from qengine.outputs import CompletionOutput, RequestOutput
from qengine.server.answers import EventStream, JSONAnswer
from qengine.server.chat_choice import ChatForm, ChoiceReader, chat_form, template_tools
from qengine.server.chat_prompt import chat_prompt
from qengine.server.chunks import Chunks
from qengine.server.errors import ApiError
from qengine.server.generation import Job, Usage, run_pieces, run_whole
from qengine.server.logprobs import chat_logprobs, prompt_logprobs
from qengine.server.protocol_chat import ChatRequest
from qengine.server.request_log import log_request
from qengine.server.sampling import chat_max_tokens, sampling_params
from qengine.server.state import ServerState
from qengine.server.structured import structured_outputs

ENDPOINT = "/v1/chat/completions"


async def create_chat_completion(state: ServerState, request: ChatRequest) -> Response:
    """The answer, which does its work while it is sent. Raises ApiError, RequestError."""
    model = state.check_model(request.model)
    prompt = await chat_prompt(
        state,
        request.messages,
        template=request.chat_template,
        template_kwargs=request.chat_template_kwargs,
        tools=template_tools(request),
        documents=request.documents,
        add_generation_prompt=_adds_prompt(request),
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt,
    )
    form, wanted = chat_form(state.settings, request, prompt.text or "", structured_outputs(request))
    if form.parser is not None and form.parser.keeps_special_tokens and request.skip_special_tokens is None:
        request.skip_special_tokens = False
    params = sampling_params(
        state,
        request,
        prompts=1,
        max_tokens=chat_max_tokens(state, request.max_completion_tokens, request.max_tokens),
        logprobs=_asked_logprobs(request),
        structured=wanted,
    )
    answer_id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
    job = Job(answer_id, ENDPOINT, model, [prompt], params, request.priority or 0)
    log_request(state.settings, job)
    writer = ChatWriter(state, request, form)
    if request.stream:
        return EventStream(state, lambda wire: run_pieces(state, job, ChatPieces(state, writer, job), wire))
    return JSONAnswer(state, lambda: writer.body(job))


def _adds_prompt(request: ChatRequest) -> bool:
    """The template's default goes with a new message only; asking for both is an error that the renderer explains."""
    asked = "add_generation_prompt" in request.model_fields_set
    return request.add_generation_prompt and (asked or not request.continue_final_message)


def _asked_logprobs(request: ChatRequest) -> int | None:
    """How many of the most likely tokens, 0 for the chosen one alone, None for nothing."""
    if not request.logprobs:
        if request.top_logprobs:
            raise ApiError(
                f"top_logprobs={request.top_logprobs} needs logprobs=true; set it, or leave top_logprobs out",
                param="top_logprobs",
            )
        return None
    return request.top_logprobs or 0


class ChatWriter:
    """The form of one request's answer."""

    def __init__(self, state: ServerState, request: ChatRequest, form: ChatForm) -> None:
        self._state = state
        self.request = request
        self.form = form
        self.logprobs = _asked_logprobs(request)
        last = request.messages[-1]
        continues = request.echo and last.role == state.settings.response_role and isinstance(last.content, str)
        self.echo = last.content if continues and isinstance(last.content, str) else ""

    async def body(self, job: Job) -> dict[str, Any]:
        """The whole answer."""
        [result] = await run_whole(self._state, job)
        usage = Usage()
        usage.add(result, first=True)
        body: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion",
            "created": self._state.now(),
            "model": job.model,
            "choices": [self._whole_choice(output) for output in result.outputs],
            "usage": usage.body(),
        }
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._state.texts, result.prompt_logprobs)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = result.prompt_token_ids
        return body

    def _whole_choice(self, output: CompletionOutput) -> dict[str, Any]:
        message, reason = self.form.message(output.text, output.finish_reason)
        if self.echo:
            message["content"] = self.echo + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": output.index,
            "message": {"role": self._state.settings.response_role, **message},
            "logprobs": self.logprobs_of(output),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def logprobs_of(self, output: CompletionOutput) -> dict[str, Any] | None:
        """Those of an output, in OpenAI's form; None where none were asked for."""
        if self.logprobs is None:
            return None
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return chat_logprobs(self._state.texts, output.token_ids, output.logprobs or [], self.logprobs, as_ids=as_ids)


class ChatPieces:
    """The answer piece by piece, as Pieces; each choice begins with the role."""

    def __init__(self, state: ServerState, writer: ChatWriter, job: Job) -> None:
        request = writer.request
        self._writer = writer
        self._request = request
        self._role = state.settings.response_role
        self._count = job.params.n
        self._chunks = Chunks(
            job.id, "chat.completion.chunk", state.now(), job.model, include_usage=request.include_usage
        )
        # What a piece has beside text, so that one may be needed where there is none.
        self._bare = bool(writer.logprobs is not None or request.return_token_ids or request.continuous_usage)
        self._plain = writer.form.plain and not self._bare
        self._usage = Usage()
        self._readers: dict[int, ChoiceReader] = {}

    def of(self, index: int, output: RequestOutput) -> bytes:
        """See Pieces."""
        request, chunks, usage = self._request, self._chunks, self._usage
        usage.add(output, first=not self._readers)
        so_far = usage.body() if request.continuous_usage else None
        parts: list[str] = []
        if not self._readers:
            more = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids else {}
            parts += [chunks.choice(self._first(number), so_far, **more) for number in range(self._count)]
            self._readers = {number: self._writer.form.reader() for number in range(self._count)}
        for choice in output.outputs:
            if self._plain and choice.finish_reason is None:
                if choice.text:
                    parts.append(chunks.content(choice.index, choice.text))
            else:
                parts += [chunks.choice(body, so_far) for body in self._bodies(choice)]
        return "".join(parts).encode("ascii")

    def last(self) -> bytes:
        """See Pieces."""
        return self._chunks.usage(self._usage.body()).encode("ascii") if self._request.include_usage else b""

    def _first(self, index: int) -> dict[str, Any]:
        delta = {"role": self._role, "content": self._writer.echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _bodies(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """The choices' bodies for what is new; logprobs and the end come with the last."""
        reader = self._readers[output.index]
        deltas = reader.feed(output.text, output.finish_reason)
        if not deltas and (output.finish_reason is not None or (self._bare and output.token_ids)):
            deltas = [{"content": ""}] if self._writer.form.plain else [{}]
        bodies: list[dict[str, Any]] = [
            {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if bodies:
            bodies[-1]["logprobs"] = self._writer.logprobs_of(output)
            if self._request.return_token_ids:
                bodies[-1]["token_ids"] = output.token_ids
            if output.finish_reason is not None:
                bodies[-1]["finish_reason"] = reader.reason(output.finish_reason)
                bodies[-1]["stop_reason"] = output.stop_reason
        return bodies

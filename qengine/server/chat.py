"""/v1/chat/completions: a conversation to a whole answer or a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from qengine.outputs import CompletionOutput
from qengine.server.answers import EventStream, JSONAnswer
from qengine.server.chat_choice import ChatForm, ChoiceReader, chat_form, template_tools
from qengine.server.chat_prompt import chat_prompt
from qengine.server.chunks import Chunks
from qengine.server.errors import ApiError
from qengine.server.generation import Job, Usage, run_stream, run_whole
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
        return EventStream(state, lambda: writer.events(job))
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
        self._request = request
        self._form = form
        self._logprobs = _asked_logprobs(request)
        last = request.messages[-1]
        continues = request.echo and last.role == state.settings.response_role and isinstance(last.content, str)
        self._echo = last.content if continues and isinstance(last.content, str) else ""

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
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._state.texts, result.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = result.prompt_token_ids
        return body

    def _whole_choice(self, output: CompletionOutput) -> dict[str, Any]:
        message, reason = self._form.message(output.text, output.finish_reason)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": output.index,
            "message": {"role": self._state.settings.response_role, **message},
            "logprobs": self._choice_logprobs(output),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    async def events(self, job: Job) -> AsyncGenerator[bytes]:
        """The answer piece by piece; each choice begins with the role."""
        request = self._request
        chunks = Chunks(
            job.id, "chat.completion.chunk", self._state.now(), job.model, include_usage=request.include_usage
        )
        plain = self._form.plain and self._logprobs is None
        plain = plain and not request.return_token_ids and not request.continuous_usage
        usage = Usage()
        readers: dict[int, ChoiceReader] = {}
        async with aclosing(run_stream(self._state, job)) as outputs:
            async for _, output in outputs:
                usage.add(output, first=not readers)
                so_far = usage.body() if request.continuous_usage else None
                parts: list[str] = []
                if not readers:
                    more = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids else {}
                    parts += [chunks.choice(self._first(index), so_far, **more) for index in range(job.params.n)]
                    readers = {index: self._form.reader() for index in range(job.params.n)}
                for choice in output.outputs:
                    if plain and choice.finish_reason is None:
                        if choice.text:
                            parts.append(chunks.content(choice.index, choice.text))
                    else:
                        parts += [chunks.choice(body, so_far) for body in self._pieces(readers[choice.index], choice)]
                if parts:
                    yield "".join(parts).encode("ascii")
        if request.include_usage:
            yield chunks.usage(usage.body()).encode("ascii")

    def _first(self, index: int) -> dict[str, Any]:
        delta = {"role": self._state.settings.response_role, "content": self._echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _pieces(self, reader: ChoiceReader, output: CompletionOutput) -> list[dict[str, Any]]:
        """The choices' bodies for what is new; logprobs and the end come with the last."""
        deltas = reader.feed(output.text, output.finish_reason)
        bare = self._logprobs is not None or self._request.return_token_ids or self._request.continuous_usage
        if not deltas and (output.finish_reason is not None or (bare and output.token_ids)):
            deltas = [{"content": ""}] if self._form.plain else [{}]
        pieces: list[dict[str, Any]] = [
            {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if pieces:
            pieces[-1]["logprobs"] = self._choice_logprobs(output)
            if self._request.return_token_ids:
                pieces[-1]["token_ids"] = output.token_ids
            if output.finish_reason is not None:
                pieces[-1]["finish_reason"] = reader.reason(output.finish_reason)
                pieces[-1]["stop_reason"] = output.stop_reason
        return pieces

    def _choice_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return chat_logprobs(self._state.texts, output.token_ids, output.logprobs or [], self._logprobs, as_ids=as_ids)

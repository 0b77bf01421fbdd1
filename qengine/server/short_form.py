"""/generate: a prompt to its text, without OpenAI's wrapping."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response

from qengine.outputs import RequestOutput
from qengine.server.answers import EventStream, JSONAnswer, dump
from qengine.server.generation import Job, Usage, run_pieces, run_whole
from qengine.server.prompts import read_prompts
from qengine.server.protocol_completions import GenerateRequest
from qengine.server.request_log import log_request
from qengine.server.sampling import completion_max_tokens, sampling_params
from qengine.server.state import ServerState
from qengine.server.structured import structured_outputs


async def generate(state: ServerState, request: GenerateRequest) -> Response:
    """{"text": [of each of the n completions], "finish_reasons": [...], "usage": {...}}; streamed, its pieces.

    Raises ApiError, RequestError.
    """
    model = state.check_model(request.model)
    prompts = await read_prompts(
        state,
        request.prompt if isinstance(request.prompt, str) else [request.prompt],
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt,
    )
    params = sampling_params(
        state,
        request,
        prompts=1,
        max_tokens=completion_max_tokens(state, request.max_tokens),
        logprobs=None,
        structured=structured_outputs(request),
    )
    priority = request.priority or 0
    job = Job(f"gen-{request.request_id or uuid.uuid4().hex}", "/generate", model, prompts, params, priority)
    log_request(state.settings, job)
    if request.stream:
        return EventStream(state, lambda wire: run_pieces(state, job, ShortPieces(), wire))
    return JSONAnswer(state, lambda: _body(state, job))


async def _body(state: ServerState, job: Job) -> dict[str, Any]:
    [result] = await run_whole(state, job)
    usage = Usage()
    usage.add(result, first=True)
    return {
        "text": [output.text for output in result.outputs],
        "finish_reasons": [output.finish_reason for output in result.outputs],
        "usage": usage.body(),
    }


class ShortPieces:
    """{"index", "text", "finish_reason"} of what is new, as Pieces."""

    def of(self, index: int, output: RequestOutput) -> bytes:
        """See Pieces."""
        parts = (
            {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason}
            for choice in output.outputs
            if choice.text or choice.finish_reason
        )
        return b"".join(b"data: " + dump(part) + b"\n\n" for part in parts)

    def last(self) -> bytes:
        """See Pieces."""
        return b""

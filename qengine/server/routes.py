"""The paths, and what each does."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import qengine
from qengine.errors import QEngineError
from qengine.server.chat import create_chat_completion
from qengine.server.completions import create_completion
from qengine.server.errors import ApiError
from qengine.server.protocol_chat import ChatRequest
from qengine.server.protocol_completions import (
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from qengine.server.short_form import generate
from qengine.server.state import ServerState
from qengine.server.tokenize import detokenize, tokenize

router = APIRouter()
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; the message says what to change."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "No such model."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests are under way; see Retry-After."},
    503: {"description": "The engine has failed, or the server stops."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"description": "JSON, or with stream=true server-sent events.", "content": {"text/event-stream": {}}},
}


def state_of(request: Request) -> ServerState:
    """What the requests of this server share."""
    state: ServerState = request.app.state.server
    return state


@router.post("/v1/completions", tags=["OpenAI"], responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts."""
    return await create_completion(state_of(request), body)


@router.post("/v1/chat/completions", tags=["OpenAI"], responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await create_chat_completion(state_of(request), body)


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> JSONResponse:
    """The names under which the model is served."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [_model(state, name) for name in state.names]})


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses={404: ERRORS[404]})
async def model(name: str, request: Request) -> JSONResponse:
    """One name."""
    state = state_of(request)
    return JSONResponse(_model(state, state.check_model(name)))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "qengine",
        "root": state.llm.llm.config.model.model,
        "parent": None,
        "max_model_len": state.max_model_len,
    }


@router.post("/generate", tags=["qengine"], responses=STREAMED)
async def generate_route(body: GenerateRequest, request: Request) -> Response:
    """The short form: {"prompt": ..., "max_tokens": 64} to {"text": [...]}."""
    return await generate(state_of(request), body)


@router.post("/tokenize", tags=["qengine"], responses={400: ERRORS[400]})
async def tokenize_route(body: TokenizeRequest, request: Request) -> JSONResponse:
    """Token ids of a prompt or a conversation."""
    return JSONResponse(await tokenize(state_of(request), body))


@router.post("/detokenize", tags=["qengine"], responses={400: ERRORS[400]})
async def detokenize_route(body: DetokenizeRequest, request: Request) -> JSONResponse:
    """The text of token ids."""
    return JSONResponse(await detokenize(state_of(request), body))


@router.get("/health", tags=["qengine"], responses={503: ERRORS[503]})
async def health(request: Request) -> JSONResponse:
    """Good if the engine finishes a step, and the server takes requests."""
    state = state_of(request)
    if state.draining:
        raise ApiError("the server stops", 503, code="shutting_down")
    try:
        await state.llm.check_health(state.settings.health_timeout)
    except QEngineError as error:
        raise ApiError(str(error), 503, code="unhealthy") from error
    return JSONResponse({"status": "ok"})


@router.get("/version", tags=["qengine"])
async def version() -> JSONResponse:
    """The server's version."""
    return JSONResponse({"version": qengine.__version__})


@router.get("/metrics", tags=["qengine"])
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    content, media_type = state_of(request).metrics.text()
    return Response(content, media_type=media_type)


@router.get("/stats", tags=["qengine"])
async def stats(request: Request) -> JSONResponse:
    """What the page shows: rates, memory, queues, the last requests."""
    return JSONResponse(state_of(request).metrics.live())

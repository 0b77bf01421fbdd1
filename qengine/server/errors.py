"""Errors as OpenAI's clients read them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from qengine.async_llm import EngineDeadError, QueueFullError
from qengine.errors import CapacityError, ClosedError, QEngineError, RequestError

logger = logging.getLogger(__name__)

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_NAMED = re.compile(r"([a-z_]+)(?:[=\[]| has )")
"""How messages about a parameter begin: `temperature=-1 is not allowed`."""
RETRY_SECONDS = 1
"""What Retry-After says: places become free as soon as any request ends."""


class ApiError(Exception):
    """An answer that is an error.

    status: of HTTP. param: the field that is wrong. code: a word for programs. retry: whether Retry-After is sent.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry = retry

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As an answer."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.retry else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about `error`. A defect of ours is logged, and its text kept from the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        named = _NAMED.match(str(error))
        return ApiError(str(error), param=named[1] if named else None, code=_code(str(error)))
    if isinstance(error, QueueFullError):
        return ApiError(str(error), 429, code="queue_full", retry=True)
    if isinstance(error, CapacityError):
        return ApiError(str(error), 503, code="out_of_memory", retry=True)
    if isinstance(error, EngineDeadError | ClosedError):
        return ApiError("the engine is not running; the server ends and has to be restarted", 503, code="engine_dead")
    if isinstance(error, QEngineError):
        return ApiError(str(error), 500, code="engine_error")
    logger.error("a request failed", exc_info=error)
    return ApiError("an internal error; the server's log has the details", 500, code="internal_error")


def _code(message: str) -> str | None:
    return "context_length_exceeded" if message.startswith("the prompt has ") else None


def validation_error(error: RequestValidationError) -> ApiError:
    """What is wrong with the first field that is, as a sentence."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(f"the body is not JSON: {why} at character {first['loc'][-1]}", code="invalid_json")
    place = [str(part) for part in first["loc"] if part != "body"]
    if not place:
        return ApiError("the body is not a JSON object; send one with Content-Type: application/json")
    if first["type"] == "missing":
        return ApiError(f"{'.'.join(place)} is missing; give it", param=place[0])
    reasons = [item for item in problems if item["loc"][1:2] == first["loc"][1:2]]
    if len(reasons) > 1:  # a field of several forms, none of which fits
        said = "; or ".join(dict.fromkeys(_lower(item["msg"]) for item in reasons))
        return ApiError(f"{place[0]} has none of its forms: {said}", param=place[0])
    return ApiError(f"{'.'.join(place)}: {_lower(first['msg'])}; got {_shown(first.get('input'))}", param=place[0])


def _unread(cause: BaseException) -> str:
    """Why a body was not even parsed."""
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8 at byte {cause.start}; send JSON in UTF-8"
    if isinstance(cause, RecursionError):
        return "the body is nested too deep; send flatter JSON"
    return f"the body cannot be read: {cause}; send JSON"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def add_handlers(app: FastAPI) -> None:
    """Have every error of `app` answered in this shape."""

    def counted(error: ApiError) -> Response:
        app.state.server.count_error(error)
        return error.response()

    async def known(request: Request, error: Exception) -> Response:
        return counted(as_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for this class alone"
        return counted(validation_error(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class alone"
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            message = f"{request.method} {request.url.path} is not known; /docs lists what is"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.method} {request.url.path} is not known; send {allowed}"
        elif isinstance(error.__cause__, (UnicodeDecodeError, RecursionError, ValueError)):
            message = _unread(error.__cause__)
        answer = counted(ApiError(message, error.status_code))
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, RequestError, CapacityError, EngineDeadError, ClosedError, Exception):
        app.add_exception_handler(kind, known)

"""What happens before a request is read: its key, its size, and whether there is room for it. Plain ASGI."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qengine.server.errors import ApiError
from qengine.server.state import ServerState

OPEN_PATHS = ("/", "/health", "/metrics", "/version", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect")
"""Served without a key, as is the page: they tell nothing of prompts, and probes and scrapers have no keys."""
COUNTED = ("/v1/completions", "/v1/chat/completions", "/generate")
"""Paths that give the engine work."""


class UnderPath:
    """Tells the routes under which path a proxy shows the server; the proxy may strip it from requests, or not."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] == "http":
            scope["root_path"] = self._root
        await self._app(scope, receive, send)


class Keys:
    """Lets a request pass whose bearer token is one of the settings' keys.

    Digests are compared, all of them and each in constant time, so that the time tells nothing of a key.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._digests = [_digest(key.encode()) for key in state.settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not _is_open(_path(scope)):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            given = _digest(token.strip().encode("latin-1"))
            matches = [hmac.compare_digest(given, digest) for digest in self._digests]
            if scheme.lower() != "bearer" or not any(matches):
                error = ApiError(
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    401,
                    code="invalid_api_key",
                )
                self._state.count_error(error)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than max_body_size with 413: by their declared length or, without one, as they come."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._most = state.settings.max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._most:
            error = self._error()
            self._state.count_error(error)
            await error.response()(scope, receive, send)
            return
        count, done = 0, False

        async def limited() -> Message:
            nonlocal count, done
            message = await receive()
            if message["type"] == "http.request" and not done:
                count += len(message.get("body", b""))
                done = not message.get("more_body", False)
                if count > self._most:
                    raise HTTPException(413, self._error().message)  # the one kind that FastAPI passes on from here
            return message

        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        return ApiError(
            f"the body has more than {self._most} bytes; shorten it, or raise --max-body-size",
            413,
            code="body_too_large",
        )


class Admission:
    """Counts the requests under way; refuses more than `most` with 429, and all while the server drains."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http" or _path(scope) not in COUNTED or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        state, most = self._state, self._state.settings.max_concurrent_requests
        error: ApiError | None = None
        if state.draining:
            error = ApiError("the server stops; send the request again", 503, code="shutting_down", retry=True)
        elif most is not None and state.active >= most:
            error = ApiError(
                f"{state.active} requests are under way, {most} are allowed; try again later, or raise "
                "--max-concurrent-requests",
                429,
                code="too_many_requests",
                retry=True,
            )
        if error is not None:
            state.count_error(error)
            await error.response()(scope, receive, send)
            return
        state.active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            state.active -= 1


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _path(scope: Scope) -> str:
    """Below the proxy's path."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] or "/" if root and path.startswith(root) else path


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/page/")

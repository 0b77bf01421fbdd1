"""Every setting of the server: its default, its meaning and its check. The engine's are in `qengine.config`."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from qengine.errors import ConfigError
from qengine.server.reasoning import reasoning_form
from qengine.server.tools import tool_parser

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_TEXTS = ("api_key", "served_model_name", "allowed_origins")


@dataclass(frozen=True)
class ServerSettings:
    """How the server listens, whom it serves, and what it refuses. Names as in vLLM where vLLM has the setting.

    host, port: where it listens. ssl_keyfile, ssl_certfile: PEM files; both or neither. root_path: the path under which
    a proxy shows it. allowed_origins: web pages of these origins may call it from a browser ("*": of all).
    api_key: any of these must come as `Authorization: Bearer KEY`; none: everybody is served.
    served_model_name: names under which requests ask for the model; the first one is in the answers. Empty: MODEL.
    chat_template: Jinja text instead of the model's own. trust_request_chat_template: let requests bring templates
    (rendered in transformers' sandbox all the same). response_role: the role of answers.
    tool_call_parser: the form in which the model writes tool calls. enable_auto_tool_choice: let the model decide
    whether to call one. reasoning_parser: the form in which it writes its reasoning, split off the answer.
    max_concurrent_requests: requests under way; the next one is answered 429. None: no limit. request_timeout: seconds
    after which a request is ended with an error; None: never. max_body_size: bytes. max_choices: completions of one
    request, prompts times n. max_words: entries of each of a request's stop and bad_words.
    drain_timeout: seconds that open requests have to finish after SIGTERM. health_timeout: seconds within which the
    engine must finish a step to be healthy. timeout_keep_alive: seconds that an idle connection stays open.
    log_requests: write prompts and parameters to the log. max_log_len: characters of a prompt there; None: all.
    uvicorn_log_level: see LOG_LEVELS. disable_uvicorn_access_log: no line for each request. disable_fastapi_docs: no
    /docs, /redoc and /openapi.json.

    Raises ConfigError.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
    max_concurrent_requests: int | None = 4096
    request_timeout: float | None = None
    max_body_size: int = 4 * 1024 * 1024
    max_choices: int = 1024
    max_words: int = 1024
    drain_timeout: float = 30.0
    health_timeout: float = 30.0
    timeout_keep_alive: float = 75.0
    log_requests: bool = False
    max_log_len: int | None = None
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_fastapi_docs: bool = False

    def __post_init__(self) -> None:
        for name in _TEXTS:
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        _whole("port", self.port, 0, 65535)
        _whole("max_body_size", self.max_body_size, 1)
        _whole("max_choices", self.max_choices, 1)
        _whole("max_words", self.max_words, 1)
        for name, low in (("max_concurrent_requests", 1), ("max_log_len", 0)):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), low)
        if self.request_timeout is not None:
            _seconds("request_timeout", self.request_timeout, allow_zero=False)
        _seconds("health_timeout", self.health_timeout, allow_zero=False)
        _seconds("drain_timeout", self.drain_timeout)
        _seconds("timeout_keep_alive", self.timeout_keep_alive)
        if self.uvicorn_log_level not in LOG_LEVELS:
            raise ConfigError(
                f"uvicorn_log_level={self.uvicorn_log_level!r} is not known; give one of {', '.join(LOG_LEVELS)}"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together; give both, or neither")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path={self.root_path!r} is not allowed; give a path that begins with /")
        if self.tool_call_parser is not None:
            tool_parser(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_form(self.reasoning_parser)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs to know how the model writes calls: give tool_call_parser")


def server_defaults() -> dict[str, Any]:
    """Setting -> default, for a command line."""
    return {item.name: item.default for item in fields(ServerSettings) if item.default is not MISSING}


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{name} has {item!r}; give texts that are not empty")
    return items


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise ConfigError(f"{name}={value!r} is not allowed; give {allowed}")


def _seconds(name: str, value: Any, *, allow_zero: bool = True) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(f"{name}={value!r} is not allowed; give seconds, {'0 or more' if allow_zero else 'above 0'}")

"""From settings to a running server, and to its end: signals, draining, an engine that fails."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from qengine.async_llm import AsyncLLM
from qengine.errors import ConfigError
from qengine.server.app import build_app
from qengine.server.heads import BoundedHeads
from qengine.server.settings import ServerSettings
from qengine.server.state import ServerState
from qengine.server.watch import Ended

logger = logging.getLogger(__name__)

FAILED_SECONDS = 1.0
"""How long a server whose engine has failed still answers, with errors, before it ends."""
LAST_SECONDS = 3.0
"""How long a connection that takes nothing may hold up the end after drain_timeout."""
CLOSE_SECONDS = 15.0
SWITCH_SECONDS = 0.002
"""How long a thread keeps Python once another wants it. By the default, 5 ms, the event loop would hand tokens on more
than a small model's step later; times much shorter than the engine's work between two waits for the device cut that
work up, and the device waits for it (measured on an H200: 0.2 ms costs 8 % of the rate against 0.5 ms)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends the process at the second.

    failed: the engine failed, and the server ended for that.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.failed = False
        self.state = state
        self.loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            scheme = "https" if self.state.settings.ssl_certfile else "http"
            shown = f"[{host}]" if ":" in host else host
            logger.info("serving %s at %s://%s:%d", ", ".join(self.state.names), scheme, shown, port)
        limits = self.state.llm.llm.engine.limits
        logger.info("max_model_len is %d; the cache holds %d tokens", limits.max_model_len, limits.pool_tokens)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, SIGINT and SIGTERM are ours; they are not raised again after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self.state.draining:
            sys.stderr.flush()
            os._exit(128 + sig)
        self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take no more requests and end when those under way are answered, or drain_timeout is over."""
        if self.state.draining:
            return
        self.state.draining = True
        seconds = self.state.settings.drain_timeout
        logger.info("%d requests under way have %g s to end; a second signal ends at once", self.state.active, seconds)
        self.loop.call_later(seconds, self.state.end_all, Ended.SHUTDOWN)
        self.should_exit = True

    async def watch_engine(self) -> None:
        """Wait for the engine's end; if it has failed, end the server."""
        await self.state.llm.wait_closed()
        if self.state.llm.errored:
            self.failed = True
            logger.critical("%s", self.state.llm.dead_error, exc_info=self.state.llm.dead_error.__cause__)
            await asyncio.sleep(FAILED_SECONDS)
            self.drain()


def run_server(llm: AsyncLLM, settings: ServerSettings) -> int:
    """Load the model, serve until a signal, close. Returns the process's exit code: 1 if the engine failed.

    Raises ConfigError where it cannot listen, before the model is loaded, and what `LLM` raises.
    """
    check_tls(settings)
    listener = bind(settings.host, settings.port)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    with listener:
        return run_loop(lambda: serve(llm, settings, listener, keep_for_good))


async def serve(
    llm: AsyncLLM,
    settings: ServerSettings,
    listener: socket.socket,
    on_server: Callable[[Server], None] = lambda server: None,
) -> int:
    """As `run_server`, on a bound socket and in a running event loop. on_server: gets the server before it listens."""
    async with llm:
        app = build_app(llm, settings)
        server = Server(uvicorn_config(app, settings), app.state.server)
        on_server(server)
        watcher = asyncio.create_task(server.watch_engine())
        await server.serve(sockets=[listener])
        watcher.cancel()
        try:
            await asyncio.wait_for(llm.close(), CLOSE_SECONDS)
        except asyncio.TimeoutError:
            logger.error("the engine does not end its step; leaving it behind")
            sys.stderr.flush()
            os._exit(1)
    return int(server.failed)


def keep_for_good(server: Server) -> None:
    """Have the garbage collector pass over what was loaded: a full collection would halt every stream for it."""
    gc.collect()
    gc.freeze()


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn's settings, with our log lines among its own."""
    log = copy.deepcopy(LOGGING_CONFIG)
    log["loggers"]["qengine"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    config = uvicorn.Config(
        app,
        http=BoundedHeads,
        log_config=log,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=settings.timeout_keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=settings.drain_timeout + LAST_SECONDS,  # type: ignore[arg-type]
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    logging.getLogger("qengine").setLevel(logging.getLogger("uvicorn.error").level)
    return config


def check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError if the TLS files cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={settings.ssl_certfile!r} and ssl_keyfile={settings.ssl_keyfile!r} cannot be used: {error}; "
            "give a certificate and its key as PEM files"
        ) from error


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, which does not listen yet. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; give another --host or --port"
        ) from error
    return made


def raise_file_limit() -> None:
    """A connection takes a file; the usual soft limit of 1,024 is fewer than the connections that are served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """`main()` in uvloop's event loop, where that is installed, else in asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())

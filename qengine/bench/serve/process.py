"""A server in a process of its own, for as long as a run needs it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from qengine.errors import QEngineError

STOP_SECONDS = 30
POLL_SECONDS = 0.2
START_SECONDS = 900


def free_port() -> int:
    """A TCP port that nothing listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(model: str, arguments: list[str], port: int | None = None) -> Iterator[str]:
    """`qengine serve MODEL ARGUMENTS` on a port of 127.0.0.1; yields its base URL once /health is good.

    Its output goes to a temporary file. Raises QEngineError with the output's end if it stops before that, or is not
    ready within START_SECONDS.
    """
    port = port or free_port()
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "qengine.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, base, log)
            yield base
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], base: str, log: IO[bytes]) -> None:
    """Return once `base`/health answers 200. Raises QEngineError."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise QEngineError(f"the server ended with {process.returncode} before it was ready: {_tail(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
            return
        time.sleep(POLL_SECONDS)
    raise QEngineError(f"the server was not ready within {START_SECONDS} s: {_tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if it has not ended STOP_SECONDS later."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def vocabulary(model: str) -> int | None:
    """vocab_size of a folder's config.json or of a `random:` shape; None where it cannot be told without loading."""
    import json

    from qengine.random_model import is_random, shape_config

    if is_random(model):
        return int(shape_config(model)["vocab_size"])
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return " ".join(log.read().decode(errors="replace").split())[-600:]

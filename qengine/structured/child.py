"""A process that compiles what may take too long, as only a process can be stopped.

    python -m qengine.structured.child          reads lines of JSON, a question each, and answers each with one

The first line is the vocabulary, as xgrammar writes it; then {"kind", "source", "free"} is answered by {"compiled"} or
{"error"}. Memory is limited, and the priority is low.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from qengine.errors import RequestError
from qengine.structured.languages import COMPILE, reason_of
from qengine.structured.vocabulary import import_xgrammar

MEMORY_BYTES = 2 << 30
"""What the process may take beside its libraries."""
LARGEST = 32 << 20
"""Bytes of the largest compiled form that is handed over; it is several times that on its way."""


class Child:
    """Starts the process when it is first needed, and again after it was ended. For one thread; `close` for any."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, kind: str, source: str, any_whitespace: bool, seconds: float) -> Any:
        """The compiled form. Raises RequestError for what is wrong, takes longer than this or too much memory."""
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            answer = self._ask(process, {"kind": kind, "source": source, "free": any_whitespace})
        finally:
            timer.cancel()
        if answer is None:
            process.kill()
            process.wait()
            why = f"takes more than {seconds:g} s" if late.is_set() else f"needs more than {MEMORY_BYTES >> 20} MiB"
            raise RequestError(f"structured_outputs.{kind} {why} to compile; simplify it")
        if "error" in answer:
            raise RequestError(f"structured_outputs.{kind} cannot be compiled: {answer['error']}")
        return import_xgrammar().CompiledGrammar.deserialize_json(answer["compiled"], self._table)

    def close(self) -> None:
        """End the process; nothing is compiled any more."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise RequestError("structured_outputs was not compiled: the engine is closing")
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-m", "qengine.structured.child"]
                root = str(Path(__file__).resolve().parents[2])
                path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
                env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=env
                )
                self._send(self._process, json.loads(self._table.serialize_json()))
            return self._process

    def _ask(self, process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any] | None:
        """None if the process ended instead of answering."""
        assert process.stdout is not None, "the process was started with a pipe"
        if not self._send(process, question):
            return None
        line = process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    @staticmethod
    def _send(process: subprocess.Popen[str], value: Any) -> bool:
        assert process.stdin is not None, "the process was started with a pipe"
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
        except (BrokenPipeError, OSError):
            return False
        return True


def limit_memory() -> None:
    """Let this process take MEMORY_BYTES more than it has now, where the system can say how much that is."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answer(compiler: Any, question: dict[str, Any]) -> dict[str, Any]:
    """What is written back."""
    try:
        compiled = COMPILE[question["kind"]](compiler, question["source"], question["free"])
        size = compiled.memory_size_bytes
        if size > LARGEST:
            return {"error": f"it has {size >> 20} MiB when compiled, {LARGEST >> 20} are allowed; simplify it"}
        return {"compiled": compiled.serialize_json()}
    except Exception as error:
        return {"error": reason_of(error)}


def main() -> int:
    """Answer until the other side closes the pipe."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    os.nice(10)
    xgrammar = import_xgrammar()
    table = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)
    limit_memory()
    for line in sys.stdin:
        out.write(json.dumps(answer(compiler, json.loads(line))) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hands kernels to the compile server, most urgent first, and says when one is done."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque

from qengine.engine.compile_server import Compiled, receive, send
from qengine.engine.launch_recorder import KernelSpec, Key

logger = logging.getLogger(__name__)
PATIENCE = 120.0
"""Seconds to wait for a kernel that is being compiled; then it is compiled here."""


class CompileClient:
    """A compile server with `workers` workers; it starts when the first kernel is added, or by `start`.

    No kernel is sent before a worker is free for it. One that is needed before it was sent is not sent any more: who
    needs it compiles it. Whatever goes wrong here leaves the kernels to those who launch them.
    """

    def __init__(self, workers: int, turing: bool) -> None:
        self._workers = workers
        self._turing = turing
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[tuple[Key, bytes]] = deque()
        self._sent: dict[int, Key] = {}
        self._done: dict[Key, threading.Event] = {}
        self._count = 0
        self._closed = False
        self._sealed = False
        self.seconds = 0.0

    def start(self) -> None:
        """Start the server, if it does not run; its imports take seconds."""
        with self._lock:
            self._start()

    def add(self, specs: dict[Key, KernelSpec]) -> None:
        """Compile these after those added before."""
        with self._lock:
            if self._closed:
                return
            for key, spec in specs.items():
                if key not in self._done:
                    self._done[key] = threading.Event()
                    self._waiting.append((key, pickle.dumps(spec)))
            if self._waiting:
                self._start()
                self._feed()

    def await_kernel(self, key: Key) -> None:
        """Wait while a worker compiles it; return at once if none does."""
        with self._lock:
            event = self._done.get(key)
            if event is None or event.is_set():
                return
            kept = [entry for entry in self._waiting if entry[0] != key]
            if len(kept) != len(self._waiting):
                self._waiting = deque(kept)
                event.set()
        if not event.wait(PATIENCE):
            logger.warning("a kernel is not compiled after %g s beside the engine; it is compiled here", PATIENCE)

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until all that was added is compiled; False if it is not within `timeout` seconds."""
        return all(event.wait(timeout) for event in list(self._done.values()))

    def seal(self) -> None:
        """Nothing will be added: the server ends when all is done."""
        with self._lock:
            self._sealed = True
            self._end_if_done()

    def close(self) -> None:
        """End the server and its workers; what they have not compiled is left. A second call does nothing."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            self._release()
        if process is not None:
            process.terminate()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _start(self) -> None:
        if self._process is not None or self._closed:
            return
        code = (
            "import sys, json; sys.path[:] = json.loads(sys.argv[3])\n"
            "from qengine.engine.compile_server import serve; serve(int(sys.argv[1]), sys.argv[2] == '1')"
        )
        command = [sys.executable, "-c", code, str(self._workers), str(int(self._turing)), json.dumps(sys.path)]
        # a worker that finds no device cannot take memory of one
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        except OSError as error:
            logger.warning("no process can be started to compile kernels ahead (%s); each is compiled when first used",
                           error)  # fmt: skip
            self._closed = True
            self._release()
            return
        threading.Thread(target=self._read, args=(self._process,), daemon=True, name="qengine-compile").start()

    def _feed(self) -> None:
        """Send as many as there are free workers; holds the lock."""
        process = self._process
        while process is not None and process.stdin is not None and self._waiting and len(self._sent) < self._workers:
            key, data = self._waiting.popleft()
            self._sent[self._count] = key
            try:
                send(process.stdin, (self._count, data))
            except OSError:
                self._release()
                return
            self._count += 1

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            while (answer := receive(process.stdout)) is not None:
                self._answered(answer)
        process.wait()
        with self._lock:
            if not self._closed and self._sent:
                logger.warning("the process that compiles kernels ahead ended with %s; kernels are compiled when first "
                               "used", process.poll())  # fmt: skip
            if not self._closed:
                self._closed = True
                self._release()

    def _answered(self, answer: Compiled) -> None:
        with self._lock:
            key = self._sent.pop(answer.number)
            self.seconds += answer.seconds
            if answer.error is not None:
                logger.warning("%s could not be compiled ahead (%s); it is compiled when first used", key[0],
                               answer.error)  # fmt: skip
            self._done[key].set()
            self._feed()
            self._end_if_done()

    def _end_if_done(self) -> None:
        """Close the server's input, on which it ends, once there is nothing left; holds the lock."""
        if self._sealed and not self._waiting and not self._sent and self._process is not None:
            self._closed = True
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _release(self) -> None:
        """Let nobody wait any more; holds the lock."""
        self._waiting.clear()
        self._sent.clear()
        for event in self._done.values():
            event.set()

"""Compiles kernels beside the engine: a process of its own, which forks a few workers once its imports are done.

It reads pickled tasks, (number, pickled KernelSpec), each after its length in 8 bytes, from its standard input, and
answers each with a pickled Compiled on its standard output in the same form. When its input ends, it ends, and its
workers with it. It never asks for a device: a worker that made a CUDA context would take the engine's memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import IO, Any

LENGTH = struct.Struct("<Q")
NICENESS = 10
"""Workers give way to the engine."""


@dataclass(frozen=True)
class Compiled:
    """What became of a task. error: why it could not be compiled, or None. seconds: it took."""

    number: int
    error: str | None
    seconds: float


def send(stream: IO[bytes], value: Any) -> None:
    """Write one message."""
    data = pickle.dumps(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return pickle.loads(data) if len(data) == size else None  # our own process wrote it


def _start_worker(parent: int) -> None:
    """In a new worker: low priority, no signals of the terminal, and an end when the server's comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _compile(number: int, spec: bytes) -> Compiled:
    start, error = time.perf_counter(), None
    try:
        pickle.loads(spec).compile()
    except Exception as failed:  # whatever the compiler raises; who launches the kernel compiles it again and raises it
        error = f"{type(failed).__name__}: {failed}"
    return Compiled(number, error, time.perf_counter() - start)


def serve(workers: int, turing: bool) -> None:
    """Answer tasks until the input ends. turing: set the hook for sm_75 before anything is compiled."""
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints is not an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from triton.runtime.cache import triton_key

    import qengine.engine.launch_recorder  # noqa: F401  (what tasks need, imported once for all workers)
    from qengine.kernels import turing as hook

    hook.ensure(75 if turing else 0)
    triton_key()
    lock = threading.Lock()

    def answer(number: int, done: Future[Compiled]) -> None:
        failed = done.exception()  # of the worker, not of the compiler: it was killed, perhaps
        result = done.result() if failed is None else Compiled(number, f"{type(failed).__name__}: {failed}", 0.0)
        with lock, contextlib.suppress(BrokenPipeError):
            send(target, result)

    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=_start_worker, initargs=(os.getpid(),))
    while (task := receive(source)) is not None:
        pool.submit(_compile, *task).add_done_callback(partial(answer, task[0]))
    os._exit(0)  # without waiting: the workers see that their parent is gone


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2] == "1")

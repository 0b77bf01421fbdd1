"""One job at a time in a thread of its own, beside the work on the next layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from qengine.convert.phases import active_clock, phase


class Behind:
    """Context manager; leaving it waits for the job that is under way, and says nothing of its errors.

    name: of the job, for the clock that may be recording.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qengine-convert")
        self._job: Future[float] | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Run `call`, after the job before."""
        self.wait()

        def timed() -> float:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

        self._job = self._pool.submit(timed)

    def wait(self) -> None:
        """Return when no job is under way. Raises what the last one raised, once."""
        job, self._job = self._job, None
        if job is None:
            return
        with phase(f"wait for {self.name}"):
            seconds = job.result()
        clock = active_clock()
        if clock is not None:
            clock.add(f"{self.name}, beside the rest", seconds)

    def __enter__(self) -> Behind:
        """The thread starts with the first job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let no job outlive the block."""
        self._pool.shutdown(wait=True)

"""Progress bars on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qengine.engine.request import Request


@contextmanager
def loading_progress(label: str = "loading") -> Iterator[Callable[[int, int], None] | None]:
    """A bar over a model's layers, or other parts: yields progress(done, total), or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def generation_progress(requests: list[Request], show: bool) -> Iterator[Callable[[list[Request]], None]]:
    """A bar over requests with the tokens generated a second: yields a function to call after each step."""
    if not show or not requests or not sys.stderr.isatty():
        yield lambda touched: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(requests), tokens=0, rate=0.0)

        def advance(touched: list[Request]) -> None:
            done = sum(request.finished for request in requests)
            tokens = sum(output.seq.num_output for request in requests for output in request.outputs)
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, tokens=tokens, rate=tokens / elapsed if elapsed else 0.0)

        yield advance

"""A run: make the requests, warm up, send them when they are due, watch the client itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qengine.bench.serve.arrivals import arrival_times
from qengine.bench.serve.client import Client, Outcome
from qengine.bench.serve.options import LoadOptions
from qengine.bench.serve.prompts import Job, as_texts, dataset_jobs, random_jobs
from qengine.errors import QEngineError

Done = Callable[[Outcome], None]
Say = Callable[[str], None]
LAG_SECONDS = 0.02
"""Between two looks at how late the client's own event loop is."""


@dataclass
class Measured:
    """A run's outcomes in order of arrival, and what they depend on.

    seconds: from the first arrival to the last end. most_open: requests under way at once. left_out: conversations of
    the file that were too long. cpu_share: of one core, that the client took. lags: seconds by which its event loop
    was late: times are wrong by so much.
    """

    options: LoadOptions
    outcomes: list[Outcome]
    seconds: float
    most_open: int
    left_out: int = 0
    server_version: Any = None
    cpu_share: float = 0.0
    lags: list[float] = field(default_factory=list)


async def measure(options: LoadOptions, say: Say = lambda text: None, done: Done = lambda outcome: None) -> Measured:
    """Run the load. `say` hears what is going on, `done` gets each finished request.

    Raises QEngineError if the server cannot be reached or the warm-up fails; later failures are in the outcomes.
    """
    async with Client(options) as client:
        listed = (await client.models())[0]
        client.options = options = replace(options, model=options.model or str(listed["id"]))
        say("making the requests")
        jobs, left_out = await make_jobs(client, listed.get("max_model_len"))
        if options.warmup:
            say("warming up")
            await warm_up(client, jobs[: options.warmup])
        say(f"{len(jobs)} requests")
        measured = await _send(client, jobs, done)
        measured.left_out, measured.server_version = left_out, await client.version()
        return measured


async def make_jobs(client: Client, most: int | None) -> tuple[list[Job], int]:
    """(the run's requests, how many of the file were left out). most: the server's max_model_len, if it tells."""
    options = client.options
    if options.dataset is not None:
        return await dataset_jobs(options, options.num_prompts, client, most)
    jobs = random_jobs(options, options.num_prompts)
    return (await as_texts(jobs, client) if options.endpoint == "chat" else jobs), 0


async def warm_up(client: Client, jobs: list[Job]) -> None:
    """Send some requests at once that are not measured. Raises QEngineError with the server's words if one fails."""
    for outcome in await asyncio.gather(*(client.run(job, Outcome(0.0), time.perf_counter()) for job in jobs)):
        if outcome.error is not None:
            raise QEngineError(
                f"the warm-up failed: {outcome.error}: {outcome.detail}; adjust lengths, --vocab-size or --api-key"
            )


async def _send(client: Client, jobs: list[Job], done: Done) -> Measured:
    options = client.options
    times = arrival_times(len(jobs), options.request_rate, options.burstiness, options.seed)
    gate = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()
    open_now = most_open = 0
    clock, cpu = time.perf_counter(), time.process_time()

    async def one(job: Job, due: float) -> Outcome:
        nonlocal open_now, most_open
        async with gate:
            outcome = Outcome(due, waited=max(0.0, time.perf_counter() - clock - due))
            open_now += 1
            most_open = max(most_open, open_now)
            try:
                await client.run(job, outcome, clock)
            finally:
                open_now -= 1
        done(outcome)
        return outcome

    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    tasks = []
    try:
        for job, due in zip(jobs, times, strict=True):
            wait = clock + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(job, due)))
        outcomes = list(await asyncio.gather(*tasks))
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
    seconds = max(outcome.sent + outcome.total for outcome in outcomes)
    spent = (time.process_time() - cpu) / (time.perf_counter() - clock)
    return Measured(options, outcomes, seconds, most_open, cpu_share=spent, lags=lags)


async def _watch(lags: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(LAG_SECONDS)
        lags.append(max(0.0, time.perf_counter() - start - LAG_SECONDS))

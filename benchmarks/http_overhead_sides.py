"""The two sides of http_overhead.py, the engine alone and the server, and the rounds that both go through."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from typing import Any, Protocol

from qengine.bench.serve.client import Client, Outcome
from qengine.bench.serve.prompts import Job

LOOK_SECONDS, RESTS, MOST_SECONDS = 0.5, 3, 60.0
"""Between two looks at a process's CPU time; how many in a row must find it at rest; how long that is waited for."""


class Target(Protocol):
    """Something that streams."""

    async def stream(self, job: Job) -> tuple[float, float, int]:
        """(seconds to the first token, to the last, tokens)."""
        ...

    async def cpu_seconds(self) -> float:
        """CPU time of the process with the engine so far."""
        ...


class Http:
    """The server, over connections that stay open."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def stream(self, job: Job) -> tuple[float, float, int]:
        """As Target's."""
        start = time.perf_counter()
        found = await self._client.run(job, Outcome(0.0), start)
        if found.error is not None or found.first is None:
            raise SystemExit(f"a request failed: {found.error}: {found.detail}")
        return found.first, found.total, found.output_tokens

    async def cpu_seconds(self) -> float:
        """As Target's."""
        line = re.search(r"^process_cpu_seconds_total (\S+)", await self._client.text("/metrics"), re.MULTILINE)
        assert line is not None, "a server on Linux has this metric"
        return float(line[1])


class Direct:
    """AsyncLLM in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def stream(self, job: Job) -> tuple[float, float, int]:
        """As Target's."""
        from qengine.async_llm import RequestOutputKind

        start, first, tokens = time.perf_counter(), None, 0
        outputs = self._llm.generate(
            {"prompt_token_ids": list(job.prompt)}, _params(job), output_kind=RequestOutputKind.DELTA
        )
        async for output in outputs:
            if first is None:
                first = time.perf_counter() - start
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
        assert first is not None, "a request yields at least once"
        return first, time.perf_counter() - start, tokens

    async def cpu_seconds(self) -> float:
        """As Target's."""
        return time.process_time()


def _params(job: Job) -> Any:
    from qengine.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)


class Loads:
    """The requests, new ones in each round, the same for every target."""

    def __init__(self, sizes: dict[str, int], vocabulary: int) -> None:
        self.sizes = sizes
        self._vocabulary = vocabulary

    def jobs(self, kind: str, number: int) -> list[Job]:
        """kind: "streams", "idle", "beside" (the first of which is the one that is timed)."""
        s, draw = self.sizes, random.Random(f"{kind} {number}")
        length, output = (s["in"], s["out"]) if kind == "streams" else (s["single_in"], 2)
        count = s["streams"] if kind == "streams" else s["singles"]
        low = min(1000, self._vocabulary // 4)
        return [Job(tuple(draw.randrange(low, self._vocabulary) for _ in range(length)), output) for _ in range(count)]


async def run_round(target: Target, loads: Loads, number: int) -> dict[str, Any]:
    """One round: the rate of all streams, and the seconds to the first token of single requests."""
    jobs = loads.jobs("streams", number)
    cpu, start = await target.cpu_seconds(), time.perf_counter()
    done = await asyncio.gather(*(target.stream(job) for job in jobs))
    seconds, cpu = time.perf_counter() - start, await target.cpu_seconds() - cpu
    tokens = sum(count for _, _, count in done)
    assert tokens == sum(job.output_tokens for job in jobs), "a request did not get all its tokens"
    idle = [(await target.stream(job))[0] for job in loads.jobs("idle", number)]
    return {
        "tokens_per_s": tokens / seconds,
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "first_ms_all_at_once": 1e3 * statistics.median(first for first, _, _ in done),
        "first_ms_idle": [1e3 * value for value in idle],
        "first_ms_beside_streams": [1e3 * value for value in await _beside(target, loads, number)],
    }


async def settled(target: Target) -> float:
    """Return once the process with the engine rests: it uses a pause to capture graphs. Gives the seconds it took."""
    start = time.perf_counter()
    used, rests = await target.cpu_seconds(), 0
    while rests < RESTS and time.perf_counter() - start < MOST_SECONDS:
        await asyncio.sleep(LOOK_SECONDS)
        now = await target.cpu_seconds()
        rests = rests + 1 if now - used < LOOK_SECONDS / 2 else 0
        used = now
    return time.perf_counter() - start


async def _beside(target: Target, loads: Loads, number: int) -> list[float]:
    """Seconds to the first token of single requests while all streams but one run."""
    jobs = loads.jobs("streams", number + 1000)[1:]
    running = [asyncio.create_task(target.stream(job)) for job in jobs]
    await asyncio.sleep(0)
    first: list[float] = []
    await _started(target, loads, number)
    for job in loads.jobs("beside", number):
        if any(task.done() for task in running):
            break  # no longer beside all of them
        first.append((await target.stream(job))[0])
    await asyncio.gather(*running)
    return first


async def _started(target: Target, loads: Loads, number: int) -> None:
    """A request that comes after the streams has its token once their prompts are computed."""
    await target.stream(loads.jobs("beside", number + 1000)[0])


def generate_round(llm: Any, loads: Loads, number: int) -> dict[str, Any]:
    """The streams of a round by LLM.generate."""
    jobs = loads.jobs("streams", number)
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
    start = time.perf_counter()
    done = llm.generate(prompts, [_params(job) for job in jobs], use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"tokens_per_s": sum(len(output.outputs[0].token_ids) for output in done) / seconds}


# The process that holds the engine without a server: a line of JSON asks for a round, a line answers.


def child(task: dict[str, Any]) -> None:
    """Load, warm up, then a round for each line of stdin."""
    from qengine.async_llm import AsyncLLM
    from qengine.llm import LLM

    llm = LLM(task["model"], **task["settings"])
    loads = Loads(task["sizes"], task["vocabulary"])
    generate_round(llm, loads, -1)

    async def serve() -> None:
        async with AsyncLLM.from_llm(llm) as served:
            await settled(Direct(served))
            await run_round(Direct(served), loads, -2)
            print(json.dumps({"ready": True}), flush=True)
            while line := (await asyncio.to_thread(sys.stdin.readline)):
                order = json.loads(line)
                number = order["number"]
                if order["kind"] == "generate":
                    found = await served.call(lambda engine, number=number: generate_round(llm, loads, number))
                else:
                    found = await run_round(Direct(served), loads, number)
                print(json.dumps(found), flush=True)

    asyncio.run(serve())


class DirectProcess:
    """The child, to be asked for rounds."""

    def __init__(self, task: dict[str, Any]) -> None:
        command = [sys.executable, __file__, json.dumps(task)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        """Return once it is loaded and warm."""
        self._answer()

    def round(self, kind: str, number: int) -> dict[str, Any]:
        """One round, "async" or "generate"."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "number": number}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine's process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))

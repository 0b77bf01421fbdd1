"""Arrivals, aborts and bad requests for as long as asked: memory must not grow, and every block be free at the end.

    python benchmarks/server_soak.py --minutes 30

`qengine serve` runs in a process of its own over a tiny random model with a small cache, so that sequences are
preempted and swapped. Requests arrive at random: streams and whole answers of both APIs, several prompts, n, logprobs,
stop strings, grammars; some connections are closed in the middle, some read slowly, some requests are wrong (and must
be answered 4xx), some are JSON that was damaged. Once a second /health must be good. The resident memory is taken after
the warm-up, and at the end once nothing runs: it may grow by 5 %. Every block must be free then. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from http_overhead import RESULTS, arguments_of, server_versions, write_tokenizer

from qengine.bench.about import commit, versions
from qengine.bench.serve.process import free_port, stop, wait_until_ready
from qengine.random_model import PREFIX, shape_config

SHAPE = "tiny"
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "swap_space": 0.02,
    "max_model_len": 512,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 48,
    "scheduling_policy": "priority",
    "priority_ageing": 5,
}
TIMEOUT = 120
"""Seconds that a client waits for the next bytes. Priorities go from -2 to 2: where more arrives than is served, a
request of priority 2 comes after all of priority -2 that arrive in the next 4 * priority_ageing seconds."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WRONG: list[dict[str, Any]] = [
    {"prompt": [999_999]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a" * 4000},
    {"prompt": "a", "n": 0},
    {"prompt": [[1], [999_999]], "max_tokens": 100},
    {"prompt": "a", "structured_outputs": {"regex": "("}},
    {"prompt": "a", "model": "none"},
    {"prompt": "a", "logit_bias": {"999999": 1}},
    {"messages": "x"},
    {},
]
GROWTH = 0.05


class Soak:
    """The load. counts: what happened, by kind; problems: what must not; longest: seconds that those who read
    at once took, by priority."""

    def __init__(self, base: str, seed: int, limit: int) -> None:
        self.base = base
        self.rng = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.longest: dict[int, float] = {}
        self._most = limit
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, rate: float) -> None:
        """Arrivals for so long, then wait for the last ones."""
        self._limit = asyncio.Semaphore(self._most)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self.base, timeout=TIMEOUT, limits=limits) as self.client:
            end, next_health = time.monotonic() + seconds, 0.0
            while time.monotonic() < end:
                await self._limit.acquire()
                task = asyncio.create_task(self._one())
                self._tasks.add(task)
                task.add_done_callback(self._done)
                if time.monotonic() >= next_health:
                    next_health = time.monotonic() + 1
                    if (await self.client.get("/health")).status_code != 200:
                        self.problems.append("/health was not good")
                await asyncio.sleep(self.rng.expovariate(rate))
            await asyncio.gather(*self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._limit.release()
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problems.append(repr(task.exception()))

    async def _one(self) -> None:
        kind = self.rng.choices(
            ("stream", "whole", "leave", "leave_whole", "slow", "wrong", "damaged"), (6, 6, 4, 3, 1, 3, 1)
        )[0]
        self.counts[kind] += 1
        if kind in ("wrong", "damaged"):
            await self._refused(kind)
            return
        path, body = self._body()
        body["stream"] = kind in ("stream", "leave", "slow")
        priority, start = body.get("priority", 0), time.monotonic()
        try:
            await self._send(kind, path, body)
        except httpx.TimeoutException:
            stats = (await self.client.get("/stats")).json()
            self.problems.append(
                f"no bytes in {TIMEOUT} s, {kind}, priority {priority}, {stats['running']} run and {stats['waiting']} "
                f"wait: {json.dumps(body)[:200]}"
            )
        if kind != "slow":
            self.longest[priority] = max(self.longest.get(priority, 0), time.monotonic() - start)

    async def _send(self, kind: str, path: str, body: dict[str, Any]) -> None:
        if kind == "whole":
            self._check((await self.client.post(path, json=body)).status_code)
        elif kind == "leave_whole":
            task = asyncio.create_task(self.client.post(path, json=body))
            await asyncio.wait({task}, timeout=self.rng.uniform(0, 0.2))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await self._read(kind, path, body)

    async def _read(self, kind: str, path: str, body: dict[str, Any]) -> None:
        left = self.rng.randrange(1, 20) if kind == "leave" else None
        async with self.client.stream("POST", path, json=body) as answer:
            self._check(answer.status_code)
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                if kind == "slow":
                    await asyncio.sleep(0.02)
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            if last != "data: [DONE]":
                self.problems.append(f"a stream ended with {last[:200]}")

    async def _refused(self, kind: str) -> None:
        body = self.rng.choice(WRONG)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        content = json.dumps(body)
        if kind == "damaged":
            cut = self.rng.randrange(len(content))
            content = content[:cut] + self.rng.choice('{}[]",:\\x00')
        answer = await self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        # What was cut off and closed may be whole again.
        allowed = (200, 400) if kind == "damaged" else (400, 404)
        if answer.status_code not in allowed:
            self.problems.append(f"{content[:100]} was answered {answer.status_code}")

    def _check(self, status: int) -> None:
        if status != 200:
            self.problems.append(f"a good request was answered {status}")

    def _body(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        body: dict[str, Any] = {"max_tokens": rng.randrange(1, 120), "ignore_eos": rng.random() < 0.7}
        if rng.random() < 0.5:
            body["seed"] = rng.randrange(1000)
        if rng.random() < 0.3:
            body["n"] = rng.randrange(1, 4)
        if rng.random() < 0.2:
            body["stop"] = [rng.choice("abcdefgh")]
        if rng.random() < 0.2:
            body["priority"] = rng.randrange(-2, 3)
        if rng.random() < 0.1:
            body["structured_outputs"] = {"regex": f"[a-z]{{{rng.randrange(1, 30)},60}}"}
        common = [rng.randrange(4)] * rng.choice((0, 32, 64))
        if rng.random() < 0.4:
            body["messages"] = [{"role": "user", "content": "x" * rng.randrange(1, 200)}]
            if rng.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": rng.randrange(5)}
            return "/v1/chat/completions", body
        count = rng.choice((1, 1, 1, 2, 4))
        body["prompt"] = [common + [rng.randrange(500) for _ in range(rng.randrange(1, 100))] for _ in range(count)]
        if rng.random() < 0.3:
            body["logprobs"] = rng.randrange(5)
        return "/v1/completions", body


def counters(base: str) -> dict[str, float]:
    """/metrics without labels, summed."""
    found: collections.Counter[str] = collections.Counter()
    for line in httpx.get(f"{base}/metrics").text.splitlines():
        match = re.match(r"(qengine:\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", line)
        if match and "_bucket" not in match[1]:
            found[match[1]] += float(match[2])
    return dict(found)


def wait_idle(base: str, seconds: float = 60) -> dict[str, Any]:
    """/stats once nothing runs and waits."""
    end = time.monotonic() + seconds
    while True:
        stats: dict[str, Any] = httpx.get(f"{base}/stats").json()
        if not stats["running"] and not stats["waiting"] and not stats["swapped"]:
            time.sleep(0.5)  # the counts are published every so often
            return httpx.get(f"{base}/stats").json()  # type: ignore[no-any-return]
        if time.monotonic() > end:
            return stats
        time.sleep(0.2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, soak, look."""
    with tempfile.TemporaryDirectory(prefix="qengine-soak-") as folder, tempfile.TemporaryFile() as log:
        write_tokenizer(Path(folder), int(shape_config(SHAPE)["vocab_size"]))
        port = free_port()
        base = f"http://127.0.0.1:{port}"
        arguments = [
            *arguments_of({**SETTINGS, "tokenizer": folder}),
            "--disable-uvicorn-access-log",
            "--chat-template",
            TEMPLATE,
        ]
        command = [sys.executable, "-m", "qengine.cli.main", "serve", PREFIX + SHAPE, "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, base, log)
            soak = Soak(base, options.seed, options.concurrency)
            asyncio.run(soak.run(60 * options.warm_up, options.rate))
            wait_idle(base)
            memory = psutil.Process(process.pid).memory_info
            samples, start = [memory().rss], time.monotonic()
            while (left := 60 * options.minutes - (time.monotonic() - start)) > 0:
                asyncio.run(soak.run(min(60.0, left), options.rate))
                samples.append(memory().rss)
                print(f"{len(samples) - 1} min: {samples[-1] / 2**20:.1f} MiB, {dict(soak.counts)}", file=sys.stderr)
            stats, seen = wait_idle(base), counters(base)
            last = memory().rss
        finally:
            stop(process)
    return {
        "benchmark": "server_soak",
        "minutes": options.minutes,
        "requests": dict(soak.counts),
        "problems": soak.problems[:10],
        "problem_count": len(soak.problems),
        "longest_seconds_by_priority": {str(level): round(soak.longest[level], 2) for level in sorted(soak.longest)},
        "rss_mib": {
            "start": samples[0] / 2**20,
            "end": last / 2**20,
            "samples": [round(s / 2**20, 1) for s in samples],
        },
        "growth": last / samples[0] - 1,
        "running": stats["running"],
        "waiting": stats["waiting"],
        "cache_used": stats["memory"]["cache_used"],
        "swap_used": stats["memory"]["swap_used"],
        "preemptions": stats["preemptions"],
        "metrics": {name: value for name, value in seen.items() if name.endswith("_total")},
        "exit_code": process.returncode,
        "versions": {**versions(), **server_versions()},
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def passed(report: dict[str, Any]) -> bool:
    """Whether nothing grew, leaked or went wrong."""
    free = report["cache_used"] == 0 and report["running"] == 0 and report["waiting"] == 0
    return free and report["growth"] < GROWTH and not report["problem_count"] and report["exit_code"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=1, help="minutes before the memory is taken")
    parser.add_argument("--rate", type=float, default=20, help="requests a second")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="server_soak")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = run(options)
    report["passed"] = passed(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return int(not report["passed"])


if __name__ == "__main__":
    sys.exit(main())

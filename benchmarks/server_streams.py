"""Many connections that stream at once: none is lost or mixed up, each answer is the one computed alone.

    python benchmarks/server_streams.py                     # 1,000 streams of a tiny random model on the CPU
    python benchmarks/server_streams.py --streams 200 --tokens 64 128

`qengine serve` runs in a process of its own. All requests are sent before the first answer is read; prompts, lengths,
seeds and temperatures differ. LLM has computed each request alone before. Where a text differs, two tokens may have
been so close that rounding decided, which depends on the size of the batch: a difference counts as such a tie only if
the request, sent to the server alone, gives the text that was computed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_overhead import RESULTS, arguments_of, server_versions, write_tokenizer

from qengine import LLM, SamplingParams
from qengine.bench.about import commit, versions
from qengine.bench.serve.process import running_server
from qengine.random_model import PREFIX, shape_config

SHAPE = "tiny"
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "swap_space": 0.0,
    "max_model_len": 512,
    "max_num_seqs": 1024,
}


@dataclass
class Stream:
    """One request, when its first and last bytes came (seconds from the start), and all of them."""

    body: dict[str, Any]
    first: float | None = None
    last: float | None = None
    received: list[bytes] = field(default_factory=list)

    def text(self) -> str:
        """What was streamed. Raises ValueError if it did not come to its end, or holds an error."""
        content = b"".join(self.received)
        if (
            not content.startswith(b"HTTP/1.1 200")
            or not content.endswith(b"0\r\n\r\n")
            or b"data: [DONE]" not in content
        ):
            raise ValueError(content[-300:].decode(errors="replace"))
        parts = []
        for line in content.split(b"\n"):
            if line.startswith(b"data: {"):
                parts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        return "".join(parts)


def requests(count: int, tokens: tuple[int, int], seed: int, vocabulary: int) -> list[dict[str, Any]]:
    """Bodies; each is determined, whatever runs beside it."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(vocabulary) for _ in range(rng.randrange(3, 25))],
            "max_tokens": rng.randrange(tokens[0], tokens[1] + 1),
            "temperature": rng.choice((0.0, 0.7, 1.0, 1.3)),
            "seed": rng.randrange(2**60),
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(count)
    ]


async def stream_all(base: str, streams: list[Stream]) -> float:
    """Connect all, then send all, then read; seconds from the first request to the last answer."""
    host, port = base.removeprefix("http://").split(":")
    links = [await asyncio.open_connection(host, int(port)) for _ in streams]
    start = time.perf_counter()

    async def read(stream: Stream, reader: asyncio.StreamReader) -> None:
        while True:
            piece = await reader.read(65536)
            now = time.perf_counter() - start
            if stream.first is None and b"data: " in piece:
                stream.first = now
            stream.received.append(piece)
            if not piece or piece.endswith(b"0\r\n\r\n"):
                stream.last = now
                return

    for stream, (_, writer) in zip(streams, links, strict=True):
        content = json.dumps(stream.body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await asyncio.gather(*(read(stream, reader) for stream, (reader, _) in zip(streams, links, strict=True)))
    seconds = time.perf_counter() - start
    for _, writer in links:
        writer.close()
    return seconds


def alone(model: str, settings: dict[str, Any], bodies: list[dict[str, Any]]) -> list[str]:
    """Each request's text, computed one at a time."""
    texts = []
    with LLM(model, **settings) as llm:
        for body in bodies:
            params = SamplingParams(
                max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"], ignore_eos=True
            )
            [output] = llm.generate({"prompt_token_ids": body["prompt"]}, params, use_tqdm=False)
            texts.append(output.outputs[0].text)
    return texts


def most_at_once(streams: list[Stream]) -> int:
    """Streams that had their first chunk and not their last, at the fullest moment."""
    events = sorted((at, step) for s in streams for at, step in ((s.first, 1), (s.last, -1)) if at is not None)
    now = most = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def percentile(values: list[float], share: float) -> float:
    """Of values that are not sorted."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Stream, then compare."""
    vocabulary = int(shape_config(SHAPE)["vocab_size"])
    bodies = requests(options.streams, tuple(options.tokens), options.seed, vocabulary)
    streams = [Stream(body) for body in bodies]
    with tempfile.TemporaryDirectory(prefix="qengine-streams-") as folder:
        write_tokenizer(Path(folder), vocabulary)
        settings = {**SETTINGS, "tokenizer": folder}
        model = PREFIX + SHAPE
        print("computing each alone", file=sys.stderr)
        wanted = alone(model, settings, bodies)
        print("streaming all at once", file=sys.stderr)
        with running_server(model, [*arguments_of(settings), "--disable-uvicorn-access-log"]) as base:
            seconds = asyncio.run(stream_all(base, streams))
            lost, different = [], []
            for index, stream in enumerate(streams):
                try:
                    if stream.text() != wanted[index]:
                        different.append(index)
                except ValueError as error:
                    lost.append(str(error))
            ties = [index for index in different if _alone_again(base, bodies[index]) == wanted[index]]
    firsts = [stream.first for stream in streams if stream.first is not None]
    tokens = sum(body["max_tokens"] for body in bodies)
    return {
        "benchmark": "server_streams",
        "streams": options.streams,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_chunk_s": {"p50": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99)},
        "most_at_once": most_at_once(streams),
        "chunks": sum(piece.count(b"data: {") for stream in streams for piece in stream.received),
        "lost": len(lost),
        "lost_examples": lost[:3],
        "different": len(different),
        "different_by_rounding": len(ties),
        "versions": {**versions(), **server_versions()},
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _alone_again(base: str, body: dict[str, Any]) -> str:
    stream = Stream(body)
    asyncio.run(stream_all(base, [stream]))
    with contextlib.suppress(ValueError):
        return stream.text()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 192), help="least and most of a stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="server_streams")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return int(report["lost"] > 0 or report["different"] > report["different_by_rounding"])


if __name__ == "__main__":
    sys.exit(main())

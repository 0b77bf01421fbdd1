"""Measure how a model is served: latency, throughput, mixed and oversubscribed load, start-up, memory, cache.

    python benchmarks/serving.py --shape llama-2-7b --memory-gib 14.6 --dtype float16 --kv-cache-dtype float16
    python benchmarks/serving.py --shape qwen2.5-7b --memory-gib 14.6 --dtype float16 --kv-cache-dtype int8
    python benchmarks/serving.py ./Qwen2.5-7B-Instruct-AWQ --loads latency,mixed

`qengine bench` with its results in benchmarks/results, or where --out says: JSON with card, versions and commit
(QENGINE_COMMIT names it where there is no checkout), a Markdown table, and a chart where matplotlib is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qengine.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(a == "--out" or a.startswith("--out=") for a in arguments) and not {"-h", "--help"} & set(arguments):
        arguments += ["--out", str(Path(__file__).parent / "results")]
    sys.argv = ["qengine", "bench", *arguments]
    main()

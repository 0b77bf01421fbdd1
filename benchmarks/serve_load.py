"""Put load on a server: `qengine bench serve` with its results in benchmarks/results, or where --out says.

python benchmarks/serve_load.py --start random:tiny --server-args "--device cpu --tokenizer FOLDER" --num-prompts 200
python benchmarks/serve_load.py --base-url http://host:8000 --request-rate 8 --num-prompts 500 --name serve_rate8
python benchmarks/serve_load.py --dataset ShareGPT.json --endpoint chat --max-concurrency 64 --goodput ttft:500 tpot:50
"""

from __future__ import annotations

import sys
from pathlib import Path

from qengine.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(a == "--out" or a.startswith("--out=") for a in arguments) and not {"-h", "--help"} & set(arguments):
        arguments = ["--out", str(Path(__file__).parent / "results"), *arguments]
    sys.argv = ["qengine", "bench", "serve", *arguments]
    main()

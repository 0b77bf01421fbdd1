"""Write the tables of sampler, serving and conversions into the documents, from the JSON in benchmarks/results.

python benchmarks/readme_tables.py            # fill the tables between <!-- name --> and <!-- end of name -->
python benchmarks/readme_tables.py --check    # exit code 1 if a table is not what the JSON says
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from convert_peer_table import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
SERVING = {
    "Llama-2-7B, fp16 cache": "serving_random_llama-2-7b_float16",
    "Llama-2-7B, int8 cache": "serving_random_llama-2-7b_int8",
    "Qwen2.5-7B, fp16 cache": "serving_random_qwen2.5-7b_float16",
}
LOADS = {"latency": "one stream", "streams": "32 streams", "mixed": "256 mixed requests"}


def read(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(result: dict[str, Any]) -> str:
    """Card, versions and commit in words."""
    versions = result["versions"]
    card = result["card"]["name"] if isinstance(result.get("card"), dict) else result.get("gpu") or result.get("device")
    return f"{card}, torch {versions['torch']}, Triton {versions['triton']}, commit {result['commit']}"


def serving() -> list[str]:
    """Output tokens a second of each load, and the tokens that the cache holds, beside vLLM's."""
    rows = ["| | load | qengine | vLLM 0.25.1 |", "|---|---|---|---|"]
    for title, name in SERVING.items():
        result = read(name)
        theirs = result["reference"] or {}
        for load in result["loads"]:
            if load["name"] in LOADS:
                other = theirs.get(load["name"])
                rate = f"{load['output_tokens_per_s']:,.0f} tokens/s"
                rows.append(f"| {title} | {LOADS[load['name']]} | {rate} | {'' if other is None else f'{other:,}'} |")
        cache = f"{result['cache']['tokens']:,} tokens"
        rows.append(f"| | cache | {cache} | {theirs.get('cache_tokens', 0):,} |")
    first = next(load for load in read(SERVING["Llama-2-7B, fp16 cache"])["loads"] if load["name"] == "ttft")
    rows.append(f"| Llama-2-7B, fp16 cache | first token of 2,000 | {first['ttft_ms']['p50']:.1f} ms | 45 ms |")
    rows += [
        f"| Llama-2-7B, fp16 cache | start to first token, {one['triton_cache']} Triton cache | "
        f"{one['first_token_s']:.1f} s | {'66 to 83 s' if one['triton_cache'] == 'warm' else ''} |"
        for one in read("serving_llama-2-7b_startup")["startup"]
    ]
    return [f"{source(read(SERVING['Llama-2-7B, fp16 cache']))}.", "", *rows]


def sampler() -> list[str]:
    """The table as the benchmark wrote it."""
    return (RESULTS / "sampler.md").read_text().strip().splitlines()


def peers() -> list[str]:
    """Perplexities of conversions by qengine and by others."""
    return markdown(read("convert_peers")).strip().splitlines()


def peers_cpu() -> list[str]:
    """The same on a CPU."""
    return markdown(read("convert_peers_cpu")).strip().splitlines()


TABLES = {"serving": serving, "sampler": sampler, "peers": peers, "peers on a CPU": peers_cpu}


def filled(text: str, names: list[str]) -> str:
    """The text with the tables between their markers."""
    for name in names:
        block = "\n".join([f"<!-- {name} -->", *TABLES[name](), "", f"<!-- end of {name} -->"])
        pattern = rf"<!-- {name} -->\n.*?<!-- end of {name} -->"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main() -> int:
    """Fill, or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    options = parser.parse_args()
    stale = []
    for path in (ROOT / "README.md", ROOT / "docs" / "converting.md", RESULTS / "README.md"):
        before = path.read_text()
        after = filled(before, [name for name in TABLES if f"<!-- {name} -->" in before])
        if before != after:
            stale.append(path)
            if not options.check:
                path.write_text(after)
    print(*(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'written'}" for path in stale), sep="\n")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())

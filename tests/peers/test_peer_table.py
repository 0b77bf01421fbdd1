"""benchmarks/convert_peer_table.py: means, spread and shares of made-up rows, and the file of the measured ones."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("convert_peers*.json"))
SPEC = importlib.util.spec_from_file_location("convert_peer_table", BENCHMARKS / "convert_peer_table.py")
peer_table = importlib.util.module_from_spec(SPEC)
sys.modules["convert_peer_table"] = peer_table  # dataclasses look it up
SPEC.loader.exec_module(peer_table)


def row(way, seed, increase, seconds=10.0):
    return {"way": way, "seed": seed, "perplexity": 20 + increase, "increase": increase, "seconds": seconds}


ROWS = [
    row("qengine-awq", 0, 1.6, 4.0),
    row("qengine-awq", 1, 2.0, 5.0),
    row("autoawq", 0, 2.0),
    row("autoawq", 1, 2.0),
    row("llmcompressor-awq", 0, 1.0),
    row("qengine-best", 0, 1.5),
    row("qengine-best", 1, 1.5),
]


def bars(rows):
    return {line["bar"]: line for line in peer_table.compare(rows)}


def test_share_is_of_the_best_peer_that_has_every_seed():
    found = bars(ROWS)
    assert found["AWQ"]["peer"] == "autoawq"
    assert found["AWQ"]["missing"] == ["llmcompressor-awq"]
    assert found["AWQ"]["shares"] == [0.8, 1.0]
    assert found["AWQ"]["share"] == 0.9
    assert not found["AWQ"]["met"]
    assert found["best"]["met"]
    assert found["best"]["share"] == 0.75
    assert "GPTQ" not in found
    complete = bars([*ROWS, row("llmcompressor-awq", 1, 2.2)])
    assert complete["AWQ"]["peer"] == "llmcompressor-awq"
    assert complete["AWQ"]["missing"] == []


def test_seconds_are_compared_with_llm_compressor_alone():
    found = bars(ROWS)
    assert found["seconds of AWQ"]["peer"] == "llmcompressor-awq"
    assert found["seconds of AWQ"]["share"] == 0.4
    assert found["seconds of AWQ"]["met"]
    assert "processor seconds of AWQ" not in found


def test_summary_has_mean_and_spread():
    line = peer_table.summary(ROWS)[0]
    assert (line["way"], line["seeds"], line["increase"]) == ("qengine-awq", [0, 1], 1.8)
    assert (line["perplexity"], line["lowest"], line["highest"]) == (21.8, 21.6, 22.0)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_file_holds_what_its_rows_come_to(file):
    table = json.loads(file.read_text(encoding="utf-8"))
    assert table["summary"] == peer_table.summary(table["rows"])
    assert table["bars"] == peer_table.compare(table["rows"])
    assert {"commit", "command", "versions", "device", "machine"} <= set(table)
    for line in table["rows"]:
        assert line["increase"] == pytest.approx(line["perplexity"] - table["source_perplexity"], abs=2e-4)
        assert line["way"].startswith("qengine") or line["versions"]["torch"]
    assert "| AWQ | " in peer_table.markdown(table) or not bars(table["rows"]).get("AWQ")

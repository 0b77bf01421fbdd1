"""Conversions that are killed, interrupted or cut off by an error, and taken up again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_convert import Stop, contents, convertible, quick_convert, stop_after

from qengine.convert.activations import Activations, fitting
from qengine.errors import CheckpointError, ConfigError

SCRIPT = Path(__file__).parent.parent / "support" / "killed_conversion.py"


@pytest.mark.parametrize(
    ("method", "kills"), [("awq", 3), pytest.param("gptq", 10, marks=pytest.mark.slow)], ids=["awq", "gptq-ten"]
)
def test_killed_at_random_moments_and_resumed(method, kills, tmp_path, text_file):
    _, folder = convertible("llama3", num_hidden_layers=8)
    command = [sys.executable, SCRIPT, folder, tmp_path / "out", text_file, str(kills), "11", method]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reached = json.loads(done.stdout.strip().splitlines()[-1])
    assert reached
    assert max(reached) > 1, "no kill came after a finished layer"
    assert contents(tmp_path / "out") == contents(tmp_path / "out-whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "out-whole"]


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_every_layer_is_a_place_to_go_on_from(method, tmp_path, text_file, monkeypatch):
    _, folder = convertible(num_hidden_layers=3)
    options = {"method": method, "shard_bytes": 60_000}
    quick_convert(folder, tmp_path / "whole", text_file, **options)
    read = []
    original = __import__("qengine.convert.converter", fromlist=["Converter"]).Converter._read_layer
    monkeypatch.setattr(
        "qengine.convert.converter.Converter._read_layer",
        lambda self, prefix, linears: read.append(prefix) or original(self, prefix, linears),
    )
    for layers in (1, 2, 3):
        with pytest.raises(Stop):
            quick_convert(folder, tmp_path / "out", text_file, resume=True, progress=stop_after(layers), **options)
    report = quick_convert(folder, tmp_path / "out", text_file, resume=True, **options)
    assert [prefix.split(".")[2] for prefix in read] == ["0", "1", "2"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(report.layers) == 21
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_head_that_is_left_still_has_its_inputs(tmp_path, text_file):
    _, folder = convertible()
    options = {"method": "gptq", "keep": {"lm_head": 8}}
    quick_convert(folder, tmp_path / "whole", text_file, **options)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    with pytest.raises(Stop):
        quick_convert(folder, tmp_path / "out", text_file, progress=stop_after(layers), **options)
    report = quick_convert(folder, tmp_path / "out", text_file, resume=True, **options)
    assert report.layers[-1].name == "lm_head"
    assert report.layers[-1].method == "gptq"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_dropped_windows_stay_dropped(tmp_path, text_file, monkeypatch):
    from qengine.layers.linear import Linear

    _, folder = convertible("llama3")
    original = Linear.__call__

    def poisoned(self, x):
        if self.name.endswith("layers.0.mlp.down_proj"):
            x = x.clone()
            x[5, 3] = float("inf")
        return original(self, x)

    monkeypatch.setattr(Linear, "__call__", poisoned)
    quick_convert(folder, tmp_path / "whole", text_file, method="awq")
    with pytest.raises(Stop):
        quick_convert(folder, tmp_path / "out", text_file, method="awq", progress=stop_after(1))
    report = quick_convert(folder, tmp_path / "out", text_file, method="awq", resume=True)
    assert report.dropped_samples == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_resume_is_held_against_the_command(tmp_path, text_file):
    _, folder = convertible()
    with pytest.raises(Stop):
        quick_convert(folder, tmp_path / "out", text_file, method="gptq", progress=stop_after(1))
    for change, words in (({"bits": 3}, "bits was 4, is 3"), ({"seed": 5}, "calibration was"), ({"sym": False}, "sym")):
        with pytest.raises(ConfigError, match=rf"started differently.*{words}.*drop --resume to start over"):
            quick_convert(folder, tmp_path / "out", text_file, **{"method": "gptq", "resume": True, **change})
    assert os.listdir(tmp_path) == [".out.partial"]
    quick_convert(folder, tmp_path / "out", text_file, method="gptq", bits=3)  # without --resume: from the start
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_to_resume_is_a_plain_start(tmp_path, text_file):
    _, folder = convertible()
    quick_convert(folder, tmp_path / "out", text_file, method="rtn", resume=True)
    with pytest.raises(ConfigError, match="not empty"):
        quick_convert(folder, tmp_path / "out", text_file, method="rtn", resume=True)


def test_damaged_states_are_said(tmp_path, text_file):
    _, folder = convertible()
    with pytest.raises(Stop):
        quick_convert(folder, tmp_path / "out", text_file, progress=stop_after(2))
    for file in (tmp_path / ".out.partial").glob("states-*.bin"):
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not what the unfinished conversion wrote.*without --resume"):
        quick_convert(folder, tmp_path / "out", text_file, resume=True)


def test_states_in_a_file_are_the_same(tmp_path):
    values = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    cpu, made = torch.device("cpu"), []
    for place in ("memory", "file"):
        states = Activations((5, 3, 4), cpu, place, lambda: tmp_path / "spill.bin")
        states.write(0, values)
        states.drop([1, 3])
        states.write(1, states.read(1, 2) + 1)
        assert states.alive == [0, 2, 4]
        assert torch.equal(states.read(0, 3), torch.stack([values[0], values[2] + 1, values[4]]))
        made.append((states.save(tmp_path / "saved.bin"), (tmp_path / "saved.bin").read_bytes()))
        again = Activations((5, 3, 4), cpu, place, lambda: tmp_path / "other.bin")
        again.load(tmp_path / "saved.bin", made[-1][0])
        assert torch.equal(again.read(0, 5)[2], values[2] + 1)
    assert made[0] == made[1]
    assert (tmp_path / "spill.bin").stat().st_size == 240


def test_places_of_states():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    seven = (128, 512, 4096)  # a 7B's: 1 GiB each
    assert fitting((64, 512, 576), cpu, 2) == ["memory", "memory"]
    assert fitting(seven, cpu, 2) == ["memory", "memory"]
    assert fitting(seven, gpu, 2) == ["device", "memory"]
    assert fitting((512, 2048, 8192), cpu, 2) == ["file", "file"]

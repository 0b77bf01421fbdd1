"""Other libraries' own quantizers through `convert --backend`, and the benchmark that compares them with ours.

    tests/peers/make_converters.sh .venv-converters      # once; about 4 GB
    QENGINE_CONVERTERS=.venv-converters python -m pytest -m peers tests/peers/test_converters.py

QENGINE_CONVERTERS names the folder of environments (default: .venv-converters in the checkout). Each library converts
in its environment, where qengine is this checkout. What it wrote is opened here and held against the source.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cut_model import first_layers
from tiny_convert import convertible

from qengine.checkpoint import open_checkpoint
from qengine.quant import open_weights

pytestmark = [pytest.mark.peers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
ENVIRONMENT = {"autoawq": "autoawq", "gptqmodel": "gptqmodel", "optimum": "gptqmodel"}

CASES = [
    ("autoawq", {}),
    ("gptqmodel", {}),
    ("gptqmodel", {"sym": False}),
    ("gptqmodel", {"format": "gptq", "sym": False}),
    ("gptqmodel", {"desc_act": True}),
    ("gptqmodel", {"bits": 8}),
    ("gptqmodel", {"bits": 3, "sym": False}),
    ("gptqmodel", {"method": "awq"}),
    ("optimum", {}),
    ("optimum", {"sym": False}),
    ("optimum", {"desc_act": True}),
]
# relative error of GPTQ's weights: AWQ's are scaled, so they are judged by perplexity alone
WEIGHT_LIMIT = {3: 0.35, 4: 0.2, 8: 0.02}


@pytest.fixture(scope="session")
def converters():
    folder = Path(os.environ.get("QENGINE_CONVERTERS", ROOT / ".venv-converters")).absolute()
    if not folder.is_dir():
        pytest.fail(f"{folder}: no such folder; make it with tests/peers/make_converters.sh {folder}")
    return folder


def convert(converters, backend, source, out, **options):
    """Its report, as a dictionary."""
    python = converters / ENVIRONMENT[backend] / "bin" / "python"
    code = (
        "import json, sys; from qengine.convert.backends.convert import convert_with_backend; "
        "source, out, options = sys.argv[1:]; "
        "print(json.dumps(convert_with_backend(source, out, **json.loads(options)).as_dict()))"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    arguments = [str(source), str(out), json.dumps({"backend": backend, **options})]
    done = subprocess.run([python, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{backend}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def weight_error(source, out):
    """Largest relative error of a linear's dequantized weight."""
    before, after = open_weights(open_checkpoint(source)), open_weights(open_checkpoint(out))
    errors = []
    for name in after.quantized_modules():
        wanted = before.linear(name).weight.float()
        errors.append(float((after.linear(name).dequantize(torch.float32) - wanted).norm() / wanted.norm()))
    assert len(errors) == 14
    return max(errors)


@pytest.mark.parametrize(("backend", "options"), CASES, ids=str)
def test_tiny_model(backend, options, tmp_path, converters):
    text = tmp_path / "text.txt"
    text.write_text("a whale is no fish but a beast of the deep sea, and so are men in boats of rope and tar. " * 60)
    _, source = convertible("llama1", num_key_value_heads=2, **SHAPE)
    out = tmp_path / "out"
    quick = {"calibration": str(text), "samples": 4, "seq_len": 48, "group_size": 32}
    report = convert(converters, backend, source, out, **quick, **options)
    assert report["linears"] == 14
    assert report["warnings"] == []
    assert report["versions"][backend]
    settings = report["settings"]
    if settings["method"] == "gptq":
        assert weight_error(source, out) < WEIGHT_LIMIT[settings["bits"]]
        said = json.loads((out / "config.json").read_text())["quantization_config"]
        assert said.get("checkpoint_format", said.get("format")) == settings["format"]
    assert settings["method"] == "awq" or said["desc_act"] is settings["desc_act"]
    spec = open_weights(open_checkpoint(out)).linear_spec("model.layers.0.self_attn.q_proj")
    assert (spec.bits, spec.desc_act, spec.sym) == (settings["bits"], settings["desc_act"], settings["sym"])


@pytest.mark.parametrize("backend", ["autoawq", "gptqmodel", "optimum"])
def test_real_layers(backend, tmp_path, smollm2, converters):
    source = first_layers(smollm2, tmp_path / "cut")
    report = convert(converters, backend, source, tmp_path / "out", samples=8, seq_len=256, sym=False)
    assert report["settings"]["group_size"] == 64
    perplexity = report["calibration_perplexity"]
    assert perplexity["after"] < 1.15 * perplexity["before"]


def test_the_comparing_benchmark(tmp_path, smollm2, converters):
    source = first_layers(smollm2, tmp_path / "cut")
    table = tmp_path / "table.json"
    ways = ["qengine-awq", "qengine-gptq", "autoawq", "gptqmodel"]
    command = [sys.executable, ROOT / "benchmarks/convert_peers.py", source, "--envs", converters, "--json", table]
    command += ["--only", *ways, "--seeds", "0", "--samples", "4", "--windows", "1"]
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["way"]: row for row in json.loads(table.read_text())["rows"]}
    assert set(rows) == set(ways)
    assert {bar["bar"] for bar in json.loads(table.read_text())["bars"]} == {"AWQ", "GPTQ"}
    assert rows["autoawq"]["versions"]["autoawq"] == "0.2.9"
    for way, row in rows.items():
        assert -0.05 < row["over"] < 0.3, f"{way}: {row}"
        assert row["seconds"] > 0
        assert row["peak_mib"] > 100

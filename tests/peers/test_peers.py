"""Our checkpoints, loaded by other libraries in an environment of their own, give the same weights and logits.

    tests/peers/make_env.sh .venv-peers          # once; about 1.5 GB
    QENGINE_PEERS_VENV=.venv-peers python -m pytest -m peers tests/peers

QENGINE_PEERS_VENV names the environment (default: .venv-peers in the checkout). GPTQModel with its plain torch backend,
and compressed-tensors, must have weights that agree bit for bit with what our loader dequantizes. transformers picks
GPTQModel's int4 kernels for a CPU, which hold scales and offsets in bfloat16: their weights agree to 0.5 % of the norm.
Logits: the peers compute them in float16 or bfloat16 and we in float32, so they agree to 1 and 3 % of the norm.
With a g++ the first load may compile a kernel for a minute.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_convert import convertible, quick_convert
from tiny_models import dense_logits, load

from qengine.checkpoint import open_checkpoint
from qengine.convert.run import convert_checkpoint
from qengine.quant import PlainWeight, open_weights

pytestmark = [pytest.mark.peers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
# (weights, logits): relative to the norm; 0 means bit for bit
EXACT, INT4_KERNEL = (0.0, 0.01), (0.005, 0.03)

SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}

CASES = [
    ("awq", {"format": "awq-gemm"}, ("transformers", "gptqmodel")),
    ("awq", {"format": "awq-gemm", "sym": True}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq"}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq", "desc_act": True}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq", "sym": False}, ("transformers",)),  # GPTQModel takes asymmetric v1 of its own only
    ("gptq", {"format": "gptq_v2", "sym": False}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq", "bits": 8}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq_v2", "bits": 3, "sym": False}, ("transformers", "gptqmodel")),
    ("gptq", {"format": "gptq_v2", "bits": 2, "sym": False}, ("transformers", "gptqmodel")),
    ("awq", {"format": "compressed-tensors", "sym": False}, ("transformers",)),
    ("gptq", {"format": "compressed-tensors", "sym": True}, ("transformers",)),
    ("gptq", {"format": "compressed-tensors", "sym": True, "bits": 3}, ("transformers",)),
    ("gptq", {"format": "compressed-tensors", "sym": True, "bits": 8}, ("transformers",)),
]


@pytest.fixture(scope="session")
def peer_python():
    venv = Path(os.environ.get("QENGINE_PEERS_VENV", ROOT / ".venv-peers"))
    python = venv / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{venv}: no such environment; make it with tests/peers/make_env.sh {venv}")
    return python


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text("a whale is no fish but a beast of the deep sea, and so are men in boats of rope and tar. " * 60)
    return path


def ask_peer(python, library, folder, out, ids):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    env |= {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, ROOT / "tests/peers/peer_load.py", library, folder, out, ",".join(map(str, ids.tolist()))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{library} cannot load {folder}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    print(library, done.stdout.strip().splitlines()[-1])
    return load_file(out)


def compare(python, library, folder, out, ids):
    theirs = ask_peer(python, library, folder, out, ids)
    source = open_weights(open_checkpoint(folder))
    modules = source.quantized_modules()
    assert modules
    kernel = library == "transformers" and source.method != "compressed-tensors"
    weight_limit, logit_limit = INT4_KERNEL if kernel else EXACT
    worst = 0.0
    for name in modules:
        weight = source.linear(name)
        assert not isinstance(weight, PlainWeight)
        ours = weight.dequantize(torch.float32)
        difference = float((theirs[name] - ours).norm() / ours.norm())
        assert difference <= weight_limit, f"{library}: {name} differs by {difference:.2e} of its norm"
        worst = max(worst, difference)
    logits = dense_logits(load(folder), ids)
    error = float((theirs["logits"] - logits).norm() / logits.norm())
    agree = float((theirs["logits"].argmax(-1) == logits.argmax(-1)).float().mean())
    print(f"{library}: {len(modules)} modules, weights {worst:.2e}, logits {error:.2e}, same argmax {agree:.3f}")
    assert error < logit_limit


@pytest.mark.parametrize(("method", "options", "libraries"), CASES, ids=str)
def test_tiny_checkpoints(method, options, libraries, tmp_path, text_file, peer_python):
    _, folder = convertible("llama1", num_key_value_heads=2, **SHAPE)
    out = tmp_path / "converted"
    quick_convert(folder, out, text_file, method=method, **options)
    ids = torch.randint(3, 290, (20,), generator=torch.Generator().manual_seed(2))
    for library in libraries:
        compare(peer_python, library, out, tmp_path / f"{library}.safetensors", ids)


@pytest.mark.parametrize(("method", "options"), [("awq", {}), ("gptq", {}), ("gptq", {"sym": False})], ids=str)
def test_smollm2(method, options, tmp_path, smollm2, peer_python):
    out = tmp_path / "converted"
    convert_checkpoint(smollm2, out, method=method, group_size=64, samples=4, seq_len=256, **options)
    ids = torch.randint(100, 40000, (48,), generator=torch.Generator().manual_seed(3))
    for library in ("transformers", "gptqmodel"):
        compare(peer_python, library, out, tmp_path / f"{library}.safetensors", ids)

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from qengine.convert.run import convert_checkpoint


@pytest.fixture(scope="module")
def first_layers(smollm2, tmp_path_factory):
    """The demo model cut to its first two layers: real weights and activations, in seconds."""
    folder = tmp_path_factory.mktemp("smollm2") / "cut"
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    tensors = {}
    for file in smollm2.glob("*.safetensors"):
        tensors.update(load_file(file))
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or int(n.split(".layers.")[1].split(".")[0]) < 2}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("method", "limit"), [("awq", 0.75), ("gptq", 0.6)])
def test_real_layers_with_bundled_text(method, limit, first_layers, tmp_path):
    report = convert_checkpoint(first_layers, tmp_path / "out", method=method, sym=False, samples=4, seq_len=256)
    assert report.group_size == 64
    assert report.warnings == ["group size 64 instead of 128 for the whole model: 128 does not divide in_features 576"]
    assert report.out_bytes < report.source_bytes
    for kind, errors in report.errors_by_kind().items():
        assert errors["error"] < errors["rtn_error"], kind
    total = [sum(e[key] for e in report.errors_by_kind().values()) for key in ("error", "rtn_error")]
    assert total[0] < limit * total[1]
    assert max(report.layer_errors) < 0.02

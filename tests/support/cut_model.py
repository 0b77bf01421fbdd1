"""The first layers of a real model as a model of its own: real weights and activations, in seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def first_layers(source: Path, target: Path, count: int = 2) -> Path:
    """Write `target`: `source` with its first `count` decoder layers only."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors.update(load_file(file))
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < count
    }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target

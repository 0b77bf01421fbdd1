"""A calibration text for tiny models, and a record of what a conversion decided."""

import os

import pytest
import torch

WORDS = ["the", "whale", "swims", "under", "a", "grey", "sea", "while", "men", "row", "and", "sing", "of", "bread"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    g = torch.Generator().manual_seed(0)
    picked = torch.randint(len(WORDS), (2500,), generator=g).tolist()
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text(" ".join(WORDS[i] for i in picked) + ".\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Hundreds of small conversions need no promise of the disk's; processes of their own still ask for it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def decided(monkeypatch):
    """Full module name -> QuantizedWeight, filled by the conversions of a test."""
    from qengine.convert.emit import Emitter

    seen = {}
    original = Emitter.layer

    def layer(self, prefix, result, weights):
        seen.update({prefix + name: weight for name, weight in result.quantized.items()})
        original(self, prefix, result, weights)

    monkeypatch.setattr(Emitter, "layer", layer)
    return seen

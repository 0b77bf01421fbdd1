"""Makes sure that the tests see `qengine.kernels`, never a stray top-level `kernels` from the checkout root."""

import sys
from pathlib import Path

import qengine

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
assert qengine.__file__ is not None

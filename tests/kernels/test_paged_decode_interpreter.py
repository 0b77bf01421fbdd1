"""The decode kernel in Triton's interpreter, on the CPU, against attention in float32.

The interpreter is chosen when a kernel is decorated, so the cases run in one process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "decode_interpreter_cases.py"

# Triton 3.6's interpreter fails at loops with a tensor bound under numpy 2.4 and later: 0-dimensional arrays only.
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
NEW_NUMPY = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)


@pytest.mark.skipif(OLD and NEW_NUMPY, reason="Triton 3.6's interpreter needs numpy 2.3 or older")
def test_every_case_agrees_in_the_interpreter() -> None:
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cases passed" in done.stdout

"""GPTQ's kernel: in Triton's interpreter, and on a GPU against the CPU's result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qengine.convert.gptq import GPTQSettings, quantize_gptq
from qengine.convert.scheme import Scheme
from qengine.convert.stats import output_error

CASE = Path(__file__).parent.parent / "support" / "gptq_kernel_case.py"


def test_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, CASE], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("order", ["static", "grouped", "act", "plain"])
@pytest.mark.parametrize(("bits", "sym", "group"), [(4, False, 64), (3, True, 128), (4, False, 192), (8, False, 100)])
def test_gpu_equals_cpu(order, bits, sym, group):
    width = group * (1024 // group)
    g = torch.Generator().manual_seed(bits)
    x = torch.randn(3000, width, generator=g) * torch.rand(width, generator=g).mul(3).exp()
    w, h = torch.randn(300, width, generator=g) * 0.05, x.T @ x / 3000
    scheme, settings = Scheme(bits, group, sym), GPTQSettings(order=order)
    cpu, gpu = quantize_gptq(w, h, scheme, settings), quantize_gptq(w.cuda(), h.cuda(), scheme, settings)
    # factors that differ in the last bits tip a rounding here and there, and each tipped one moves later columns
    assert (cpu.q != gpu.q.cpu()).float().mean() < 0.05
    errors = [float(output_error(m.dequantize().cpu() - w, h)) for m in (cpu, gpu)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)

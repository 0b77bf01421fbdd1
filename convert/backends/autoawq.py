"""AutoAWQ's own quantizer, in a process where `awq` can be imported."""

from __future__ import annotations

import time
from typing import Any

from qengine.convert.backends.job import PeerJob
from qengine.errors import UnsupportedError

MENDED = "0.2.9"
"""The version whose scale search `mend` was checked with."""


def quantize(job: PeerJob) -> float:
    """Convert and save. Returns the seconds that the quantizer took."""
    import torch
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    if job.device == "cpu":
        mend()
    dtype = torch.float32 if job.device == "cpu" else torch.float16
    # Blocks go to the card one by one, the rest of the model stays in memory.
    model = AutoAWQForCausalLM.from_pretrained(job.source, torch_dtype=dtype, device_map="cpu")
    tokenizer = AutoTokenizer.from_pretrained(job.source)
    config = {"zero_point": not job.sym, "q_group_size": job.group_size, "w_bit": job.bits, "version": "GEMM"}
    started = time.monotonic()
    model.quantize(
        tokenizer,
        quant_config=config,
        calib_data=job.windows,
        max_calib_samples=len(job.windows),
        max_calib_seq_len=len(job.windows[0]),
    )
    seconds = time.monotonic() - started
    model.save_quantized(job.out)
    return seconds


def mend() -> None:
    """Make the scale search's backup of the weights a copy, which on a CPU it is not.

    AutoAWQ keeps `{name: tensor.cpu()}` of a module, scales its weights in place and loads the backup back. On a CPU
    `.cpu()` is the tensor itself, so every trial stays in the weights and the result is ruined without an error. Here
    the module's state_dict gives copies while the search runs. Raises UnsupportedError for a version other than that
    which this was checked with.
    """
    from importlib.metadata import version

    from awq.quantize.quantizer import AwqQuantizer

    found = version("autoawq")
    if found != MENDED:
        raise UnsupportedError(
            f"--backend autoawq --device cpu: AutoAWQ's scale search ruins the weights on a CPU without an error, and "
            f"the repair is known for {MENDED} only, {found} is installed; use --device cuda, or "
            "pip install 'qengine[autoawq]'"
        )
    search = AwqQuantizer._compute_best_scale

    def with_copies(self: Any, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *args: Any, **kwargs: Any) -> Any:
        original = module2inspect.state_dict
        module2inspect.state_dict = lambda *a, **k: {n: t.detach().clone() for n, t in original(*a, **k).items()}
        try:
            return search(self, x, w_mean, x_mean, module2inspect, *args, **kwargs)
        finally:
            del module2inspect.state_dict

    AwqQuantizer._compute_best_scale = with_copies

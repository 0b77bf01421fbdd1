"""GPTQModel's own quantizers, GPTQ and AWQ, in a process where `gptqmodel` can be imported."""

from __future__ import annotations

import time
from typing import Any

from qengine.convert.backends.job import PeerJob


def quantize(job: PeerJob) -> float:
    """Convert and save, with the library's defaults for all that the job does not say. Returns its seconds."""
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(**settings(job))
    # float32 where float16 is slow, but not for AWQ, whose modules refuse it; the default may be bfloat16
    dtype = torch.float32 if job.device == "cpu" and job.method == "gptq" else torch.float16
    model = GPTQModel.load(job.source, config, dtype=dtype, device="cpu" if job.device == "cpu" else "cuda:0")
    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job.windows]
    # What packs AWQ's codes by itself is a CUDA kernel's module.
    packer = BACKEND.AWQ_TORCH if job.method == "awq" and job.device == "cpu" else BACKEND.AUTO
    started = time.monotonic()
    model.quantize(data, batch_size=1, backend=packer)
    seconds = time.monotonic() - started
    model.save(job.out)
    return seconds


def settings(job: PeerJob) -> dict[str, Any]:
    """The job in the words of its QuantizeConfig."""
    common: dict[str, Any] = {"bits": job.bits, "group_size": job.group_size, "sym": job.sym}
    if job.method == "awq":
        return {**common, "quant_method": "awq", "format": "gemm"}
    value = {**common, "quant_method": "gptq", "format": job.format, "desc_act": job.desc_act}
    if job.desc_act or job.group_size == -1:
        value["act_group_aware"] = False  # its default, which neither of the two allows
    return value

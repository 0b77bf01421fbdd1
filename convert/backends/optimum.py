"""Optimum's GPTQ quantizer, in a process where `optimum` and the `gptqmodel` beneath it can be imported."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from qengine.convert.backends.job import PeerJob


def quantize(job: PeerJob) -> float:
    """Convert and save. Returns the seconds that the quantizer took."""
    import torch
    from optimum.gptq import GPTQQuantizer
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if job.device == "cpu" else torch.float16
    model: Any = AutoModelForCausalLM.from_pretrained(job.source, dtype=dtype)
    model.to(job.device)
    quantizer = GPTQQuantizer(
        bits=job.bits,
        dataset=[_sample(ids) for ids in job.windows],
        group_size=job.group_size,
        desc_act=job.desc_act,
        act_group_aware=not job.desc_act and job.group_size != -1,
        sym=job.sym,
        model_seqlen=len(job.windows[0]),
    )
    started = time.monotonic()
    model = quantizer.quantize_model(model)
    seconds = time.monotonic() - started
    # The configs hold the whole data set, tensors that JSON has no word for, as they are written.
    quantizer.dataset = None
    model.config.quantization_config = quantizer.to_dict()
    quantizer.save(model, job.out)
    restate_format(Path(job.out), quantizer.to_dict())
    return seconds


def _sample(ids: list[int]) -> dict[str, Any]:
    import torch

    tokens = torch.tensor([ids])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def restate_format(folder: Path, quantization: dict[str, Any]) -> None:
    """Say in config.json what the tensors are.

    `save` turns symmetric tensors to GPTQ v1 after config.json's text was fixed as gptq_v2: readers that go by it are
    off by one in every zero point. What the quantizer says afterwards, in quantize_config.json, is right.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in quantization.items() if key != "dataset"}
    config["quantization_config"] = {**config.get("quantization_config", {}), **kept, "quant_method": "gptq"}
    config["quantization_config"].pop("dataset", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

"""Which implementation each linear layer of a checkpoint would get, from headers alone."""

from __future__ import annotations

from typing import Any

import torch

from qengine.checkpoint import Checkpoint
from qengine.layers.linear import choose
from qengine.layers.linear_impl import LinearCase
from qengine.models.loading import tied_to_embedding
from qengine.models.registry import model_spec
from qengine.quant import WeightSource, open_weights


def linear_paths(ckpt: Checkpoint, *, device: str, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """One row for each kind of linear: name, count, shape [N, K], weights (in words), path (the implementation).

    dtype: what the model would compute in; float32 on a CPU and float16 elsewhere if not given.
    """
    spec, source = model_spec(ckpt), open_weights(ckpt)
    place = torch.device(device)
    dtype = dtype or (torch.float32 if place.type == "cpu" else torch.float16)
    modules = {
        f"{spec.prefix}layers.{index}.{name}": name for index in range(spec.num_layers) for name in spec.linear_shapes()
    }
    if not tied_to_embedding(source, spec):
        modules[spec.head_name] = spec.head_name
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for module, name in modules.items():
        case = _case(source, module, dtype, place)
        row = {"name": name, "shape": list(case.shape), "weights": _weights(case), "path": choose(case).name}
        key = tuple(str(value) for value in row.values())
        rows.setdefault(key, {**row, "count": 0})["count"] += 1
    return list(rows.values())


def _case(source: WeightSource, module: str, dtype: torch.dtype, device: torch.device) -> LinearCase:
    quant = source.linear_spec(module)
    tensors = source.checkpoint.tensors
    stored = torch.float16 if quant is not None else tensors[f"{module}.weight"].dtype
    exact = True if stored == torch.float16 else (False if stored == torch.bfloat16 else None)
    return LinearCase(source.linear_shape(module), quant, stored, dtype, device, fp16_exact=exact)


def _weights(case: LinearCase) -> str:
    if case.quant is None:
        return str(case.weight_dtype).removeprefix("torch.")
    order = ", act-order" if case.quant.desc_act else ""
    return f"{case.quant.method} {case.quant.bits}-bit, group {case.quant.group_size}{order}"

"""What a checkpoint is, layer by layer, as plain data: read from headers, nothing is loaded."""

from __future__ import annotations

import logging
from math import prod
from typing import Any

from qengine.checkpoint import Checkpoint
from qengine.errors import QEngineError
from qengine.quant.reader import short
from qengine.quant.source import WeightSource

logger = logging.getLogger(__name__)


def summarize(source: WeightSource) -> dict[str, Any]:
    """JSON-ready description of a checkpoint.

    Keys: path, architecture, model_type, dtype, method, format, writer, config_origin, tied_embeddings, servable,
    reason (why not, or None), layers (name, shape [N, K], quantized, bits, group_size, sym, act_order, format, bias,
    bytes, error), tensors (name, dtype, shape, bytes: all that is no matrix), files (name, bytes) and totals.
    """
    checkpoint = source.checkpoint
    text = checkpoint.text_config()
    layers = [_quantized(source, name) for name in source.quantized_modules()]
    plain, tensors = _plain(source)
    layers += plain
    reason = _reason(source)
    formats = sorted({layer["format"] for layer in layers if layer["quantized"] and layer["format"]})
    return {
        "path": str(checkpoint.path),
        "architecture": _architecture(checkpoint.config),
        "model_type": text.get("model_type"),
        "dtype": text.get("dtype") or text.get("torch_dtype"),
        "method": source.method,
        "format": formats[0] if len(formats) == 1 else formats or None,
        "writer": (source.config.writer or None) if source.config else None,
        "config_origin": source.config.origin if source.config else None,
        "tied_embeddings": bool(text.get("tie_word_embeddings", False)),
        "servable": reason is None,
        "reason": reason,
        "layers": layers,
        "tensors": tensors,
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in checkpoint.tensors.files],
        "totals": _totals(checkpoint, layers, tensors),
    }


def _architecture(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _reason(source: WeightSource) -> str | None:
    try:
        source.check()
    except QEngineError as error:
        return str(error)
    return None


def _quantized(source: WeightSource, name: str) -> dict[str, Any]:
    layer: dict[str, Any] = {"name": name, "shape": None, "quantized": True, "bits": None, "group_size": None}
    layer |= {"sym": None, "act_order": None, "format": None, "error": None}
    layer["bias"] = f"{name}.bias" in source.checkpoint.tensors
    layer["bytes"] = source.module_bytes(name)
    try:
        spec = source.linear_spec(name)
        layer["shape"] = list(source.linear_shape(name))
    except QEngineError as error:
        layer["error"] = str(error)
        return layer
    if spec is not None:
        layer |= {"bits": spec.bits, "group_size": spec.group_size, "sym": spec.sym}
        layer |= {"act_order": spec.desc_act, "format": spec.format}
    return layer


def _plain(source: WeightSource) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    layers, tensors = [], []
    infos = source.checkpoint.tensors
    quantized = set(source.quantized_modules())
    names = set(source.plain_tensors())
    for name in source.plain_tensors():
        info, module = infos[name], name.rpartition(".")[0]
        if name.endswith(".weight") and len(info.shape) == 2:
            layer: dict[str, Any] = {"name": module, "shape": list(info.shape), "quantized": False}
            layer |= {"bits": 8 * info.dtype.itemsize, "group_size": None, "sym": None, "act_order": None}
            layer |= {"format": short(info.dtype), "error": None, "bias": f"{module}.bias" in names}
            layers.append(layer | {"bytes": source.module_bytes(module)})
        elif not (name.endswith(".bias") and (module in quantized or _is_matrix(source, module))):
            tensors.append({"name": name, "dtype": short(info.dtype), "shape": list(info.shape), "bytes": info.nbytes})
    return layers, tensors


def _is_matrix(source: WeightSource, module: str) -> bool:
    info = source.checkpoint.tensors.get(f"{module}.weight")
    return info is not None and len(info.shape) == 2


def _totals(checkpoint: Checkpoint, layers: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> dict[str, Any]:
    known = [layer for layer in layers if layer["shape"]]
    quantized = [layer for layer in known if layer["quantized"]]
    parameters = sum(prod(layer["shape"]) + (layer["shape"][0] if layer["bias"] else 0) for layer in known)
    parameters += sum(prod(tensor["shape"]) for tensor in tensors)
    weights = sum(prod(layer["shape"]) for layer in quantized)
    nbytes = checkpoint.tensors.nbytes
    complete = parameters > 0 and len(known) == len(layers)
    return {
        "layers": len(layers),
        "quantized_layers": sum(layer["quantized"] for layer in layers),
        "parameters": parameters if complete else None,
        "quantized_parameters": weights if complete else None,
        "tensor_bytes": nbytes,
        "disk_bytes": checkpoint.disk_bytes(),
        "bits_per_weight": round(8 * nbytes / parameters, 3) if complete else None,
        "quantized_bits_per_weight": (
            round(8 * sum(layer["bytes"] for layer in quantized) / weights, 3) if weights else None
        ),
    }

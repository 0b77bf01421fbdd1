"""Which reader a checkpoint needs: a literal table, the tensors' shapes before the config's word."""

from __future__ import annotations

import logging

from qengine.checkpoint import Checkpoint, TensorStore
from qengine.quant.awq import AWQReader
from qengine.quant.compressed_tensors import CompressedTensorsReader
from qengine.quant.config import QuantConfig, parse_quant_config
from qengine.quant.gptq import GPTQReader, is_gptq_shaped
from qengine.quant.reader import FormatReader
from qengine.quant.refused import REASONS, RefusedReader, reason_for

logger = logging.getLogger(__name__)

READERS: dict[str, type[FormatReader]] = {
    "awq": AWQReader,
    "gptq": GPTQReader,
    "compressed-tensors": CompressedTensorsReader,
}
METHODS = (*READERS, "auto-round")
GPTQ_FORMATS = ("", "gptq", "gptq_v2", "gptq_p")
CT_FORMATS = ("", "dense", "pack-quantized", "naive-quantized", "int-quantized", "mixed-precision")


def make_reader(checkpoint: Checkpoint, config: QuantConfig | None) -> FormatReader | None:
    """The reader of the checkpoint's quantized modules; None for a plain checkpoint."""
    tensors = checkpoint.tensors
    if config is None:
        config = _guess_config(tensors)
        if config is None:
            return None
    refusal = _refusal(config)
    if refusal is not None:
        return RefusedReader(tensors, config, *refusal)
    return READERS[_kind(tensors, config)](tensors, config)


def _guess_config(tensors: TensorStore) -> QuantConfig | None:
    """A config for quantized tensors that nothing describes; None if there are none."""
    method = None
    if any(name.endswith(".weight_packed") for name in tensors):
        method = "compressed-tensors"
    elif (shapes := _first_shapes(tensors)) is not None:
        method = "gptq" if is_gptq_shaped(*shapes) else "awq"
    if method is None:
        return None
    logger.warning(
        "no quantization config found: taken for %s with the widths and groups that the tensors show", method
    )
    return parse_quant_config({"quant_method": method}, "(no config)")


def _first_shapes(tensors: TensorStore) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    for name, info in tensors.items():
        scales = tensors.get(f"{name.removesuffix('.qweight')}.scales") if name.endswith(".qweight") else None
        if scales is not None:
            return info.shape, scales.shape
    return None


def _kind(tensors: TensorStore, config: QuantConfig) -> str:
    """awq, gptq or compressed-tensors, by the config and then by the shape of the first module."""
    kind = config.method
    if kind == "auto-round":
        kind = "awq" if "awq" in config.format else "gptq"
        if "llm_compressor" in config.format or any(name.endswith(".weight_packed") for name in tensors):
            return "compressed-tensors"
    shapes = _first_shapes(tensors)
    if shapes is None or kind == "compressed-tensors" or config.format in ("gemv", "gemv_fast", "llm-awq"):
        return kind
    shown = "gptq" if is_gptq_shaped(*shapes) else "awq"
    if shown != kind:
        logger.warning(
            "%s declares %s, but the tensors have %s's shapes; the tensors decide", config.origin, kind, shown
        )
    return shown


def _refusal(config: QuantConfig) -> tuple[str, str] | None:
    """(what, why) if the checkpoint cannot be served."""
    if config.method not in METHODS:
        return config.method, reason_for(config.method) or f"it is not one of {', '.join(METHODS)}"
    if config.get("is_marlin_format"):
        return "marlin", REASONS["marlin"]
    formats = [config.format]
    if config.method == "compressed-tensors":
        groups = config.get("config_groups")
        formats += (
            [str(g.get("format") or "") for g in groups.values() if isinstance(g, dict)]
            if isinstance(groups, dict)
            else []
        )
        for layout in formats:
            if layout not in CT_FORMATS:
                return layout, reason_for(layout) or f"it is not one of {', '.join(CT_FORMATS[1:])}"
        return None
    return _packed_refusal(config, formats[0])


def _packed_refusal(config: QuantConfig, layout: str) -> tuple[str, str] | None:
    for key in ("checkpoint_format", "format", "version"):
        named = str(config.get(key) or "").lower()
        reason = reason_for(named)
        if reason is not None:
            return named, reason
    if config.method == "gptq" and layout not in GPTQ_FORMATS:
        return layout, f"it is not one of {', '.join(GPTQ_FORMATS[1:])}"
    data_type = str(config.get("data_type") or "int").lower()
    if config.method == "auto-round" and not data_type.startswith("int"):
        return f"auto-round {data_type}", reason_for(data_type) or "only integer weights can be served"
    return None

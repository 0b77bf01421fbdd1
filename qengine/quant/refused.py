"""Formats that are known but not served: refused by name, with the reason and what to use instead."""

from __future__ import annotations

from qengine.checkpoint import TensorStore
from qengine.errors import UnsupportedError
from qengine.quant.config import QuantConfig
from qengine.quant.reader import FormatReader
from qengine.quant.weights import QuantizedWeight, QuantSpec

_USE = "use the AWQ, GPTQ or compressed-tensors INT4 version of the model, or `qengine convert` the original"
REASONS = {
    "marlin": "its weights are repacked for the Marlin kernel of newer GPUs",
    "marlin-24": "its weights are 2:4 sparse and repacked for the Marlin kernel",
    "bitblas": "its weights are repacked for the BitBLAS kernel",
    "fp8": "FP8 weights are not supported",
    "fbgemm-fp8": "FP8 weights are not supported",
    "modelopt": "NVIDIA ModelOpt's FP8 and NVFP4 weights are not supported",
    "float-quantized": "FP8 weights are not supported",
    "nvfp4": "FP4 weights are not supported",
    "mxfp4": "FP4 weights are not supported",
    "bitsandbytes": "bitsandbytes' NF4, FP4 and LLM.int8 weights are not supported",
    "gguf": "GGUF block formats are not supported",
    "hqq": "HQQ's layout is not supported",
    "quanto": "optimum-quanto's layout is not supported",
    "eetq": "EETQ's layout is not supported",
    "aqlm": "AQLM's codebooks are not supported",
    "vptq": "VPTQ's codebooks are not supported",
    "quip": "QuIP's codebooks are not supported",
    "exl2": "ExLlamaV2's mixed-width layout is not supported",
    "exl3": "ExLlamaV3's trellis layout is not supported",
    "qqq": "QQQ's layout is not supported",
    "spqr": "SpQR's sparse outliers are not supported",
    "higgs": "HIGGS' layout is not supported",
    "torchao": "torchao stores tensor subclasses, which are not supported",
    "bitnet": "ternary BitNet weights are not supported",
    "paroquant": "ParoQuant's rotations are not supported",
}
_MARKS = ("qweight", "B", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "absmax", "W_q", "scales")


def reason_for(method: str) -> str | None:
    """Why the method cannot be served; None if it is not a known one."""
    for name, reason in REASONS.items():
        if method == name or method.startswith((f"{name}-", f"{name}_")):
            return reason
    return None


class RefusedReader(FormatReader):
    """Stands for a checkpoint that cannot be served: it opens, so that it can be inspected, and refuses its layers."""

    suffixes = _MARKS

    def __init__(self, tensors: TensorStore, config: QuantConfig, what: str, reason: str) -> None:
        super().__init__(tensors, config)
        self.what = what
        self.reason = reason

    def modules(self) -> list[str]:
        """Every module with a tensor that only quantized modules have."""
        found = (name.rpartition(".") for name in self.tensors)
        return list(dict.fromkeys(module for module, _, last in found if last in _MARKS and module))

    def _refuse(self, name: str) -> UnsupportedError:
        return UnsupportedError(f"{name}: format {self.what!r} cannot be served: {self.reason}; {_USE}")

    def check_model(self) -> None:
        """Always refuses, with the first quantized layer as the example."""
        modules = self.modules()
        raise self._refuse(modules[0] if modules else self.config.origin)

    def check(self, name: str) -> tuple[int, int]:
        """Refuses."""
        raise self._refuse(name)

    def spec(self, name: str) -> QuantSpec:
        """Refuses."""
        raise self._refuse(name)

    def load(self, name: str) -> QuantizedWeight:
        """Refuses."""
        raise self._refuse(name)

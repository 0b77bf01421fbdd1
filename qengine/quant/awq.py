"""AWQ checkpoints: gemm (AutoAWQ, GPTQModel, AutoRound), gemv (AutoAWQ), gemv_fast (AutoAWQ, llm-awq)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from qengine.errors import CheckpointError, UnsupportedError
from qengine.kernels.awq.packing import unpack_gemm, unpack_gemv, unpack_gemv_fast
from qengine.kernels.bitstream import words_for
from qengine.quant.groups import choose_bits, choose_group_size
from qengine.quant.overrides import module_setting
from qengine.quant.reader import SCALE_DTYPES, FormatReader, check_finite, expect_shape
from qengine.quant.weights import QuantizedWeight, QuantSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shape:
    """What the headers of one module say. group_size is resolved (never -1)."""

    layout: str
    out_features: int
    in_features: int
    groups: int
    bits: int
    group_size: int


class AWQReader(FormatReader):
    """Modules of qweight, qzeros and scales; the layout is told by their dtypes and shapes, the config breaks ties."""

    suffixes = ("qweight", "qzeros", "scales")

    def modules(self) -> list[str]:
        """Modules with a qweight."""
        return [name.removesuffix(".qweight") for name in self.tensors if name.endswith(".qweight")]

    def check_model(self) -> None:
        """GELU families store a scale beside their activation; such a model cannot be run without it."""
        super().check_model()
        for name in self.tensors:
            base = name.removesuffix(".scales")
            if base == name or f"{base}.qweight" in self.tensors:
                continue
            if not any(word in base.rpartition(".")[2].lower() for word in ("act", "gelu")):
                raise CheckpointError(f"{base}: qweight is missing from the checkpoint; download or convert it again")
            raise UnsupportedError(
                f"{base}: AWQ scales this activation (GELU models such as Falcon, MPT, GPT-NeoX, BLOOM, "
                "StarCoder2), which "
                "is not supported; quantize the model with GPTQ, or with AWQ without scaling activations"
            )

    def check(self, name: str) -> tuple[int, int]:
        """(N, K), after the shapes of all tensors were found to fit."""
        shape = self._shape(name)
        return shape.out_features, shape.in_features

    def spec(self, name: str) -> QuantSpec:
        """Format is gemm, gemv or gemv_fast."""
        shape = self._shape(name)
        whole = (
            shape.group_size >= shape.in_features
            and module_setting(self.config, name, "group_size", self.config.group_size) == -1
        )
        return QuantSpec(
            bits=shape.bits,
            group_size=-1 if whole else shape.group_size,
            sym=bool(module_setting(self.config, name, "sym", bool(self.config.sym))),
            desc_act=False,
            method=self.method,
            format=shape.layout,
        )

    def load(self, name: str) -> QuantizedWeight:
        """The module, unpacked."""
        shape = self._shape(name)
        scales = self.load_scales(name)
        qweight, qzeros = self.tensors.load(f"{name}.qweight"), self.tensors.load(f"{name}.qzeros")
        if shape.layout == "gemm":
            q, zeros, used = unpack_gemm(qweight, qzeros, scales, shape.bits)
        elif shape.layout == "gemv":
            q, zeros, used = unpack_gemv(qweight, qzeros, scales, shape.groups)
        else:
            check_finite(name, "qzeros", qzeros)
            try:
                q, zeros, used = unpack_gemv_fast(qweight, qzeros, scales, shape.groups)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; the checkpoint is damaged: convert the model again") from error
        return QuantizedWeight(q, used, zeros, self.spec(name), None, self.load_bias(name, shape.out_features))

    def _shape(self, name: str) -> _Shape:
        qweight = self.part(name, "qweight", (torch.int32, torch.int16))
        scales = self.part(name, "scales", SCALE_DTYPES)
        fast = qweight.dtype == torch.int16
        qzeros = self.part(name, "qzeros", SCALE_DTYPES if fast else (torch.int32,))
        for suffix, info in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
            if len(info.shape) != 2 or 0 in info.shape:
                raise CheckpointError(f"{name}: {suffix} has shape {list(info.shape)}, expected a matrix")
        if fast:
            shape = self._fast_shape(name)
        elif self._is_gemv(name):
            shape = self._gemv_shape(name)
        else:
            shape = self._gemm_shape(name)
        self.check_bias(name, shape.out_features)
        return shape

    def _hints(self, name: str) -> list[int]:
        return [module_setting(self.config, name, "group_size", self.config.group_size), self.config.group_size]

    def _is_gemv(self, name: str) -> bool:
        """gemv: qweight, qzeros and scales all have a row an output. gemm: qzeros and scales have a row a group."""
        qweight, qzeros = self.tensors[f"{name}.qweight"].shape, self.tensors[f"{name}.qzeros"].shape
        scales = self.tensors[f"{name}.scales"].shape
        gemv = qweight[0] == qzeros[0] == scales[0] and scales[1] == 8 * qzeros[1]
        gemm = qzeros[0] == scales[0] and qweight[1] == qzeros[1]
        if gemv and gemm:
            return self.config.format == "gemv"
        if gemv and self.config.format not in ("gemv", ""):
            logger.warning(
                "%s: config says version=%s, its tensors are gemv; the tensors decide", name, self.config.format
            )
        return gemv

    def _gemm_shape(self, name: str) -> _Shape:
        qweight, qzeros = self.tensors[f"{name}.qweight"], self.tensors[f"{name}.qzeros"]
        in_features, words = qweight.shape
        groups, out_features = self.tensors[f"{name}.scales"].shape
        hint = module_setting(self.config, name, "bits", self.config.bits)
        found = f"qweight {list(qweight.shape)}, scales {[groups, out_features]}"
        bits = choose_bits(name, hint, lambda b: words_for(out_features, b) == words, found)
        expect_shape(name, "qzeros", qzeros, (groups, words))
        if bits == 4 and out_features % 8:
            raise CheckpointError(
                f"{name}: out_features={out_features} must be a multiple of 8 in AWQ's 4-bit gemm layout"
            )
        size = choose_group_size(name, in_features, groups, self._hints(name))
        return _Shape("gemm", out_features, in_features, groups, bits, size)

    def _gemv_shape(self, name: str) -> _Shape:
        out_features, words = self.tensors[f"{name}.qweight"].shape
        return self._padded_shape(name, "gemv", out_features, 8 * words, self.tensors[f"{name}.scales"].shape[1])

    def _fast_shape(self, name: str) -> _Shape:
        quarter, in_features = self.tensors[f"{name}.qweight"].shape
        scales, qzeros = self.tensors[f"{name}.scales"], self.tensors[f"{name}.qzeros"]
        if in_features % 64:
            raise CheckpointError(f"{name}: in_features={in_features} must be a multiple of 64 in the gemv_fast layout")
        expect_shape(name, "scales", scales, (scales.shape[0], 4 * quarter))
        expect_shape(name, "qzeros", qzeros, scales.shape)
        return self._padded_shape(name, "gemv_fast", 4 * quarter, in_features, scales.shape[0])

    def _padded_shape(self, name: str, layout: str, out_features: int, in_features: int, padded: int) -> _Shape:
        """Scales are padded past the last group, so the config alone knows the group size."""
        size = self._hints(name)[0]
        size = size if size > 0 else in_features
        groups = -(-in_features // size)
        if groups > padded:
            raise CheckpointError(
                f"{name}: group_size={size} makes {groups} groups of in_features={in_features}, its scales hold "
                f"{padded}; "
                "correct group_size in the quantization config"
            )
        return _Shape(layout, out_features, in_features, groups, 4, size)

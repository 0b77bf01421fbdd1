"""compressed-tensors (llm-compressor): pack-quantized of 2 to 8 bits, and naive-quantized / int-quantized int8
files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from qengine.errors import CheckpointError, UnsupportedError
from qengine.kernels.bitstream import pack_stream, unpack_padded, unpack_stream, words_for
from qengine.quant.groups import choose_bits, choose_group_size
from qengine.quant.overrides import matches_target
from qengine.quant.reader import SCALE_DTYPES, FormatReader, expect_shape, simplify_group_index
from qengine.quant.weights import QuantizedWeight, QuantSpec

logger = logging.getLogger(__name__)

DENSE_SINCE = (0, 18)  # from this version 3, 5, 6 and 7 bit codes straddle words; before, each word was padded


def pack_quantized(
    q: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    *,
    symmetric: bool,
    g_idx: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """q uint8 [N, K], zeros [N, G], scales [N, G] -> weight_packed, weight_scale, weight_shape and, if asymmetric,
    weight_zero_point; weight_g_idx where g_idx is given.

    Codes are offset binary on disk as here (signed value + 2**(bits-1)), so they are stored as they are; zero points
    are
    packed along N. ValueError if `symmetric` and a zero point is not 2**(bits-1).
    """
    if symmetric and not bool((zeros == 2 ** (bits - 1)).all()):
        raise ValueError(f"a symmetric layer must have every zero point {2 ** (bits - 1)}")
    packed = {
        "weight_packed": pack_stream(q, bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
    }
    if not symmetric:
        packed["weight_zero_point"] = pack_stream(zeros.t().contiguous(), bits).t().contiguous()
    if g_idx is not None:
        packed["weight_g_idx"] = g_idx.to(torch.int32)
    return packed


@dataclass(frozen=True)
class _Shape:
    """What the headers of one module say. group_size is resolved (never -1)."""

    out_features: int
    in_features: int
    groups: int
    bits: int
    group_size: int
    packed: bool
    padded: bool


class CompressedTensorsReader(FormatReader):
    """A module is quantized if it has weight_packed, or an int8 weight with a weight_scale."""

    suffixes = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
    )

    def modules(self) -> list[str]:
        """Modules with weight_packed or weight_scale."""
        marks = (".weight_packed", ".weight_scale")
        found = (name.rpartition(".")[0] for name in self.tensors if name.endswith(marks))
        return list(dict.fromkeys(found))

    def check_model(self) -> None:
        """Refuse transforms and sparsity, which change what a layer computes."""
        transforms = self.config.get("transform_config") or {}
        if transforms.get("config_groups") if isinstance(transforms, dict) else transforms:
            raise UnsupportedError(
                f"{self.config.origin}: transform_config (rotations such as QuIP or SpinQuant) cannot be served; "
                "quantize the model again without transforms"
            )
        sparsity = self.config.get("sparsity_config") or {}
        layout = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "unknown"
        if layout != "dense":
            raise UnsupportedError(
                f"{self.config.origin}: sparsity_config format {layout!r} cannot be served; save the model "
                "without sparsity"
            )
        activations = [g for g in self._groups() if g.get("input_activations")]
        if activations:
            logger.warning(
                "%s: input_activations are declared quantized; qengine keeps them in floating point, which is "
                "more exact",
                self.config.origin,
            )

    def check(self, name: str) -> tuple[int, int]:
        """(N, K), after the shapes of all tensors, and the values of weight_g_idx, were found to fit."""
        shape = self._shape(name)
        self._group_index(name, shape)
        return shape.out_features, shape.in_features

    def spec(self, name: str) -> QuantSpec:
        """Format is pack-quantized, naive-quantized or int-quantized."""
        shape = self._shape(name)
        g_idx, size = self._group_index(name, shape)
        layout = str(self._group(name).get("format") or self.config.format)
        if shape.packed:
            layout = "pack-quantized"
        elif layout not in ("naive-quantized", "int-quantized"):
            layout = "int-quantized"
        whole = shape.groups == 1 and self._weights(name).get("strategy") in (None, "channel", "tensor")
        return QuantSpec(
            bits=shape.bits,
            group_size=-1 if whole else size,
            sym=f"{name}.weight_zero_point" not in self.tensors,
            desc_act=g_idx is not None,
            method=self.method,
            format=layout,
        )

    def load(self, name: str) -> QuantizedWeight:
        """The module, unpacked."""
        shape = self._shape(name)
        scales = self.load_scales(name, "weight_scale")
        scales = scales.reshape(-1, shape.groups).expand(shape.out_features, shape.groups).contiguous()
        if shape.packed:
            unpack = unpack_padded if shape.padded else unpack_stream
            q = unpack(self.tensors.load(f"{name}.weight_packed"), shape.bits, shape.in_features).contiguous()
        else:
            signed = self.tensors.load(f"{name}.weight")
            self._check_range(name, "weight", signed, shape.bits)
            q = (signed.to(torch.int16) + 2 ** (shape.bits - 1)).to(torch.uint8)
        g_idx, _ = self._group_index(name, shape)
        bias = self.load_bias(name, shape.out_features)
        return QuantizedWeight(q, scales, self._zeros(name, shape), self.spec(name), g_idx, bias)

    # config

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.config.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"{self.config.origin}: config_groups must be an object of objects; correct it")
        return list(groups.values())

    def _group(self, name: str) -> dict[str, Any]:
        """The group that targets the module by name, else the first one that targets a class."""
        by_class: dict[str, Any] = {}
        for group in self._groups():
            listed = group.get("targets")
            targets = [str(target) for target in listed] if isinstance(listed, list) else []
            if any(matches_target(target, name, self.config.origin) for target in targets):
                return group
            if not by_class and any(target[:1].isupper() for target in targets):
                by_class = group
        return by_class

    def _weights(self, name: str) -> dict[str, Any]:
        weights = self._group(name).get("weights")
        return weights if isinstance(weights, dict) else {}

    def _old(self) -> bool:
        parts = str(self.config.get("version") or "").split(".")[:2]
        numbers = [int(part) for part in parts if part.isdigit()]
        return len(numbers) == 2 and tuple(numbers) < DENSE_SINCE

    # shapes

    def _shape(self, name: str) -> _Shape:
        weights = self._weights(name)
        if weights.get("type", "int") != "int":
            raise UnsupportedError(
                f"{name}: weights of type {weights.get('type')!r} cannot be served, only int; use an INT4 or INT8 "
                "version"
            )
        packed = f"{name}.weight_packed" in self.tensors
        hint = weights.get("num_bits")
        padded = False
        if packed:
            out_features, in_features, bits, padded = self._packed_shape(name, hint if isinstance(hint, int) else None)
        else:
            out_features, in_features = self._int8_shape(name)
            bits = hint if isinstance(hint, int) and 2 <= hint <= 8 else 8
        groups = self._scale_groups(name, out_features)
        hints = [weights.get("group_size") or -1]
        try:
            size = choose_group_size(name, in_features, groups, hints)
        except CheckpointError:
            if f"{name}.weight_g_idx" not in self.tensors:
                raise
            size = in_features
        shape = _Shape(out_features, in_features, groups, bits, size, packed, padded)
        self._check_zero_shape(name, shape)
        self.check_bias(name, out_features)
        return shape

    def _packed_shape(self, name: str, hint: int | None) -> tuple[int, int, int, bool]:
        info = self.tensors[f"{name}.weight_packed"]
        if info.dtype == torch.uint8 or f"{name}.weight_global_scale" in self.tensors:
            raise UnsupportedError(f"{name}: nvfp4 and mxfp4 (FP4) weights cannot be served; use an INT4 version")
        self.part(name, "weight_packed", (torch.int32,))
        expect_shape(name, "weight_shape", self.part(name, "weight_shape", (torch.int64, torch.int32)), (2,))
        out_features, in_features = (int(size) for size in self.tensors.load(f"{name}.weight_shape"))
        if len(info.shape) != 2 or info.shape[0] != out_features or in_features < 1 or out_features < 1:
            raise CheckpointError(
                f"{name}: weight_shape is [{out_features}, {in_features}], weight_packed has shape {list(info.shape)}; "
                "convert the model again"
            )
        width = info.shape[1]

        def fits(bits: int) -> bool:
            return width in (words_for(in_features, bits), -(-in_features // (32 // bits)))

        bits = choose_bits(name, hint, fits, f"weight_packed {list(info.shape)}, in_features {in_features}")
        return out_features, in_features, bits, self._is_padded(width, in_features, bits, self._old())

    @staticmethod
    def _is_padded(words: int, count: int, bits: int, otherwise: bool) -> bool:
        """Whether words hold whole codes only; `otherwise` where both layouts take the same number of words."""
        dense, padded = words_for(count, bits), -(-count // (32 // bits))
        return otherwise if dense == padded else words == padded

    def _int8_shape(self, name: str) -> tuple[int, int]:
        info = self.tensors.get(f"{name}.weight")
        if info is not None and info.dtype.is_floating_point:
            what = "FP8 weights cannot be served" if info.dtype.itemsize == 1 else "scales beside uncompressed weights"
            raise UnsupportedError(
                f"{name}: {what} (weight is {info.dtype}); use an INT4 version or save the model with "
                "save_compressed=True"
            )
        info = self.part(name, "weight", (torch.int8,))
        if len(info.shape) != 2 or 0 in info.shape:
            raise CheckpointError(f"{name}: weight has shape {list(info.shape)}, expected [out_features, in_features]")
        return info.shape[0], info.shape[1]

    def _scale_groups(self, name: str, out_features: int) -> int:
        shape = self.part(name, "weight_scale", SCALE_DTYPES).shape
        if shape in ((), (1,), (1, 1)) or shape == (out_features,):
            return 1
        if len(shape) == 2 and shape[0] == out_features and shape[1] > 0:
            return shape[1]
        if self._weights(name).get("strategy") == "block":
            raise UnsupportedError(
                f"{name}: block-wise scales {list(shape)} cannot be served; use group or channel scales"
            )
        raise CheckpointError(
            f"{name}: weight_scale has shape {list(shape)}, expected [{out_features}, groups], [{out_features}, "
            "1] or [1]; "
            "convert the model again"
        )

    # zero points and groups

    def _check_zero_shape(self, name: str, shape: _Shape) -> None:
        info = self.tensors.get(f"{name}.weight_zero_point")
        if info is None:
            return
        self.part(name, "weight_zero_point", (torch.int8, torch.int32))
        if self._zeros_packed(name):
            allowed = {words_for(shape.out_features, shape.bits), -(-shape.out_features // (32 // shape.bits))}
            if info.shape[1] != shape.groups or info.shape[0] not in allowed:
                raise CheckpointError(
                    f"{name}: weight_zero_point has shape {list(info.shape)}, expected [{min(allowed)}, "
                    f"{shape.groups}]; "
                    "convert the model again"
                )
        elif info.nbytes // info.dtype.itemsize not in (1, shape.groups * shape.out_features):
            expect_shape(name, "weight_zero_point", info, (shape.out_features, shape.groups))

    def _zeros_packed(self, name: str) -> bool:
        info = self.tensors[f"{name}.weight_zero_point"]
        return info.dtype == torch.int32 and len(info.shape) == 2 and f"{name}.weight_packed" in self.tensors

    def _zeros(self, name: str, shape: _Shape) -> torch.Tensor:
        """int16 [N, G], offset as the codes are."""
        middle = 2 ** (shape.bits - 1)
        if f"{name}.weight_zero_point" not in self.tensors:
            return torch.full((shape.out_features, shape.groups), middle, dtype=torch.int16)
        stored = self.tensors.load(f"{name}.weight_zero_point")
        if self._zeros_packed(name):
            padded = self._is_padded(stored.shape[0], shape.out_features, shape.bits, shape.padded or self._old())
            unpack = unpack_padded if padded else unpack_stream
            return unpack(stored.t().contiguous(), shape.bits, shape.out_features).t().contiguous().to(torch.int16)
        self._check_range(name, "weight_zero_point", stored, shape.bits)
        zeros = stored.to(torch.int16).reshape(-1, shape.groups) + middle
        return zeros.expand(shape.out_features, shape.groups).contiguous()

    def _check_range(self, name: str, suffix: str, values: torch.Tensor, bits: int) -> None:
        low, high = int(values.min()), int(values.max())
        if low < -(2 ** (bits - 1)) or high >= 2 ** (bits - 1):
            raise CheckpointError(
                f"{name}: {suffix} holds values from {low} to {high}, beyond {bits} bits; "
                "correct num_bits in the quantization config or convert the model again"
            )

    def _group_index(self, name: str, shape: _Shape) -> tuple[torch.Tensor | None, int]:
        info = self.tensors.get(f"{name}.weight_g_idx")
        if info is None:
            return None, shape.group_size
        self.part(name, "weight_g_idx", (torch.int32, torch.int64))
        expect_shape(name, "weight_g_idx", info, (shape.in_features,))
        g_idx = self.tensors.load(f"{name}.weight_g_idx").to(torch.int32)
        if bool((g_idx == -1).all()):
            return None, shape.group_size  # how the library marks an order that was never set
        return simplify_group_index(name, g_idx, shape.in_features, shape.groups, shape.group_size)

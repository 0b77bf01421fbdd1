"""GPTQ checkpoints: AutoGPTQ, GPTQModel, optimum, and AutoRound's GPTQ-packed files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch

from qengine.errors import CheckpointError, UnsupportedError
from qengine.kernels.bitstream import unpack_stream, words_for
from qengine.kernels.gptq.packing import unpack_gptq
from qengine.quant.groups import choose_bits, choose_group_size
from qengine.quant.overrides import module_setting
from qengine.quant.reader import SCALE_DTYPES, FormatReader, expect_shape, simplify_group_index
from qengine.quant.weights import QuantizedWeight, QuantSpec

logger = logging.getLogger(__name__)

V2_FORMATS = ("gptq_v2", "auto_round", "auto_round:gptqmodel", "auto_round:gptq_v2")


@dataclass(frozen=True)
class _Shape:
    """What the headers of one module say. group_size is resolved (never -1)."""

    out_features: int
    in_features: int
    groups: int
    bits: int
    group_size: int
    planar: bool


class GPTQReader(FormatReader):
    """qweight int32 [ceil(K*bits/32), N], qzeros int32 [G, ceil(N*bits/32)], scales [G, N], g_idx int32 [K]
    optional."""

    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def modules(self) -> list[str]:
        """Modules with a qweight."""
        return [name.removesuffix(".qweight") for name in self.tensors if name.endswith(".qweight")]

    def check_model(self) -> None:
        """Refuse word sizes that no file was ever seen with."""
        super().check_model()
        pack_dtype = str(self.config.get("pack_dtype") or "int32").removeprefix("torch.")
        if pack_dtype != "int32":
            raise UnsupportedError(
                f"{self.config.origin}: pack_dtype={pack_dtype} is not supported, only int32; quantize the model "
                "again with it"
            )

    def check(self, name: str) -> tuple[int, int]:
        """(N, K), after the shapes of all tensors, and the values of g_idx, were found to fit."""
        shape = self._shape(name)
        self._group_index(name, shape)
        return shape.out_features, shape.in_features

    def spec(self, name: str) -> QuantSpec:
        """Format is gptq, gptq_v2 or gptq_p as the zero points show."""
        shape = self._shape(name)
        g_idx, size = self._group_index(name, shape)
        whole = (
            size >= shape.in_features and module_setting(self.config, name, "group_size", self.config.group_size) == -1
        )
        return QuantSpec(
            bits=shape.bits,
            group_size=-1 if whole else size,
            sym=bool(module_setting(self.config, name, "sym", True if self.config.sym is None else self.config.sym)),
            desc_act=g_idx is not None,
            method=self.method,
            format="gptq_p" if shape.planar else "gptq_v2" if self._is_v2(name, shape) else "gptq",
        )

    def load(self, name: str) -> QuantizedWeight:
        """The module, unpacked."""
        shape, spec = self._shape(name), self.spec(name)
        scales = self.load_scales(name)
        q, zeros, scales = unpack_gptq(
            self.tensors.load(f"{name}.qweight"),
            self.tensors.load(f"{name}.qzeros"),
            scales,
            shape.bits,
            in_features=shape.in_features,
            v2=spec.format != "gptq",
            wordwise=self._wordwise,
            planar=shape.planar,
        )
        g_idx, _ = self._group_index(name, shape)
        return QuantizedWeight(q, scales, zeros, spec, g_idx, self.load_bias(name, shape.out_features))

    @cached_property
    def _wordwise(self) -> bool:
        """GPTQModel (and this engine) subtract v1's one from whole words; AutoGPTQ and AutoRound work code by code."""
        return any(writer in self.config.writer.lower() for writer in ("gptqmodel", "qengine"))

    def _planar(self, bits: int) -> bool:
        if bits in (2, 4, 8):
            return False  # a single plane is the dense stream
        # GPTQModel knows 5, 6 and 7 bits in split planes only, whatever the config calls its format.
        return self.config.format == "gptq_p" or (bits != 3 and "gptqmodel" in self.config.writer.lower())

    def _shape(self, name: str) -> _Shape:
        qweight = self.part(name, "qweight", (torch.int32,))
        qzeros = self.part(name, "qzeros", (torch.int32,))
        scales = self.part(name, "scales", SCALE_DTYPES)
        for suffix, info in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
            if len(info.shape) != 2 or 0 in info.shape:
                raise CheckpointError(f"{name}: {suffix} has shape {list(info.shape)}, expected a matrix")
        rows, out_features = qweight.shape
        groups = scales.shape[0]
        expect_shape(name, "scales", scales, (groups, out_features))
        in_features = self._in_features(name)

        def fits(bits: int) -> bool:
            down = rows == words_for(in_features, bits) if in_features else rows * 32 % bits == 0
            return down and qzeros.shape[1] == words_for(out_features, bits)

        hint = module_setting(self.config, name, "bits", self.config.bits)
        found = f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)}, in_features {in_features or 'unknown'}"
        bits = choose_bits(name, hint, fits, found)
        expect_shape(name, "qzeros", qzeros, (groups, words_for(out_features, bits)))
        in_features = in_features or rows * 32 // bits
        planar = self._planar(bits)
        if planar and (in_features % 32 or out_features % 32):
            raise CheckpointError(f"{name}: gptq_p needs multiples of 32, got [{out_features}, {in_features}]")
        self.check_bias(name, out_features)
        hints = [module_setting(self.config, name, "group_size", self.config.group_size), self.config.group_size]
        try:
            size = choose_group_size(name, in_features, groups, hints)
        except CheckpointError:
            if not self._has_index(name):
                raise
            size = in_features  # g_idx alone says which row is of which group
        return _Shape(out_features, in_features, groups, bits, size, planar)

    def _has_index(self, name: str) -> bool:
        info = self.tensors.get(f"{name}.g_idx")
        return info is not None and info.shape != (0,)

    def _in_features(self, name: str) -> int | None:
        if not self._has_index(name):
            return None
        info = self.part(name, "g_idx", (torch.int32, torch.int64))
        if len(info.shape) != 1:
            raise CheckpointError(f"{name}: g_idx has shape {list(info.shape)}, expected [in_features]")
        return info.shape[0]

    def _group_index(self, name: str, shape: _Shape) -> tuple[torch.Tensor | None, int]:
        if not self._has_index(name):
            return None, shape.group_size
        g_idx = self.tensors.load(f"{name}.g_idx").to(torch.int32)
        return simplify_group_index(name, g_idx, shape.in_features, shape.groups, shape.group_size)

    # v1 or v2?

    def _is_v2(self, name: str, shape: _Shape) -> bool:
        """Symmetric zero points are all the middle code in v2 and one less in v1: that decides, before the config."""
        if shape.planar:
            return True
        sym = module_setting(self.config, name, "sym", True if self.config.sym is None else self.config.sym)
        vote, all_votes = self._votes[name], self._unanimous
        if vote is not None and (sym or all_votes is not None):
            return vote
        return self._declared_v2 if all_votes is None else all_votes

    @cached_property
    def _declared_v2(self) -> bool:
        """What the config says; the side file's word where the two differ, as GPTQModel, which writes both, reads
        it."""
        if self.config.format == "gptq_p":
            return True
        side = self.config.side.get("checkpoint_format") or self.config.side.get("format")
        return (str(side).lower() if side else self.config.format) in V2_FORMATS

    @cached_property
    def _votes(self) -> dict[str, bool | None]:
        return {name: self._vote(name) for name in self.modules()}

    def _vote(self, name: str) -> bool | None:
        """True: every stored zero point (of the first groups) is 2**(bits-1) (v2). False: one less (v1). None:
        neither."""
        shape = self._shape(name)
        if shape.planar:
            return None
        rows = max(8, 4096 // shape.out_features)  # enough to tell, and little to read
        codes = unpack_stream(self.tensors.load(f"{name}.qzeros", slice(0, rows)), shape.bits, shape.out_features)
        first = int(codes[0, 0])
        middle = 2 ** (shape.bits - 1)
        if first not in (middle - 1, middle) or not bool((codes == first).all()):
            return None
        return first == middle

    @cached_property
    def _unanimous(self) -> bool | None:
        """The version that the zero points of the whole checkpoint show, if they agree; a warning if the config
        differs."""
        votes = [vote for vote in self._votes.values() if vote is not None]
        declared_sym = self.config.sym is not False
        if not votes or len(set(votes)) > 1 or (not declared_sym and len(votes) < len(self._votes)):
            return None
        if not declared_sym and sum(self.tensors[f"{name}.scales"].shape[1] for name in self._votes) < 64:
            return None  # too few zero points: an asymmetric layer may have equal ones by chance
        if votes[0] != self._declared_v2 and self.config.format != "gptq_p":
            named = {True: "v2 (stored as they are)", False: "v1 (stored less one)"}
            logger.warning(
                "%s declares checkpoint_format=%s, but the zero points are %s; the tensors decide",
                self.config.origin,
                self.config.format or "(none)",
                named[votes[0]],
            )
        return votes[0]


def is_gptq_shaped(qweight: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """GPTQ's qweight has a column an output, as scales do; AWQ's has fewer."""
    return len(qweight) == 2 and len(scales) == 2 and qweight[1] == scales[1]

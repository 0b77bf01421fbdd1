"""Turns layers and everything around them into the tensors and files of the new folder."""

from __future__ import annotations

import copy
from typing import Any

import torch

from qengine.checkpoint import Checkpoint
from qengine.checkpoint.writer import SHARD_BYTES
from qengine.convert.formats import Plan, pack
from qengine.convert.layer_result import LayerResult
from qengine.convert.settings import ConvertSettings
from qengine.convert.writer import FolderWriter
from qengine.models.spec import ModelSpec
from qengine.quant import WeightSource
from qengine.quant.weights import QuantizedWeight

COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
NOT_COPIED = {"config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "report.json"}

MAX_COPIED_BYTES = 200_000_000


class Emitter:
    """Writes to a FolderWriter. Plain tensors are stored in float16, or in float32 where float16 would overflow."""

    def __init__(self, writer: FolderWriter, source: WeightSource, plan: Plan, settings: ConvertSettings) -> None:
        self.writer = writer
        self.source = source
        self.plan = plan
        self.settings = settings

    def outside_layers(self, prefixes: list[str]) -> None:
        """Embeddings, final norm, head and whatever else belongs to no decoder layer."""
        for name in self.source.names():
            if not name.startswith(tuple(prefixes)) and name != f"{self.plan.head()}.weight":
                self._plain(name, self.source.tensor(name))

    def layer(self, prefix: str, result: LayerResult, weights: dict[str, torch.Tensor]) -> None:
        """One layer's tensors, in the order of the source's names."""
        for full in self.source.names():
            if not full.startswith(prefix):
                continue
            module, _, part = full.removeprefix(prefix).rpartition(".")
            if part == "weight" and module in result.quantized:
                for suffix, tensor in self.packed(f"{prefix}{module}", result.quantized[module]).items():
                    self.writer.add(f"{prefix}{module}.{suffix}", tensor)
            elif part == "weight" and module in weights:
                self._plain(full, result.to_file(module, weights[module]))
            elif module in result.norms and part in ("weight", "bias"):
                weight, bias = result.norms[module]
                value = weight if part == "weight" else bias
                assert value is not None, f"{full}: the norm's bias was not folded"
                self._plain(full, value)
            elif part == "bias" and module in result.rows:
                self._plain(full, self.source.tensor(full).float() / result.rows[module].cpu())
            else:
                self._plain(full, self.source.tensor(full))

    def head(self, name: str, result: LayerResult) -> None:
        """The quantized output head."""
        for suffix, tensor in self.packed(name, result.quantized[name]).items():
            self.writer.add(f"{name}.{suffix}", tensor)

    def packed(self, module: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The tensors of one module by suffix."""
        return pack(weight, self.settings, self.plan.grid(module, self.settings)[2])

    def _plain(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            half = tensor.to(torch.float16)
            overflows = bool(torch.isinf(half).any()) and not bool(torch.isinf(tensor).any())
            tensor = tensor.float() if overflows else half
        self.writer.add(name, tensor)

    def side_files(self, checkpoint: Checkpoint, quantization: dict[str, Any]) -> None:
        """Tokenizer, chat template, generation config and licences; GPTQ's own side file."""
        for file in sorted(checkpoint.path.iterdir()):
            wanted = file.suffix in COPIED_SUFFIXES or file.name.upper().startswith(COPIED_NAMES)
            if not wanted or not file.is_file() or file.name in NOT_COPIED or file.name.endswith(".index.json"):
                continue
            if file.stat().st_size <= MAX_COPIED_BYTES:
                self.writer.add_bytes(file.name, file.read_bytes())
        if quantization["quant_method"] == "gptq":
            self.writer.add_json("quantize_config.json", quantization)

    @staticmethod
    def config(checkpoint: Checkpoint, quantization: dict[str, Any]) -> dict[str, Any]:
        """The source's config.json with the quantization config and float16 as the dtype."""
        config = copy.deepcopy(checkpoint.config)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop("torch_dtype", None)
                part["dtype"] = "float16"
        config["quantization_config"] = quantization
        return config


def estimate_bytes(
    source: WeightSource, plan: Plan, settings: ConvertSettings, spec: ModelSpec, windows: torch.Tensor | None
) -> int:
    """About how much disk the conversion takes at its largest: the new folder, one shard twice, the saved states."""
    total = 20_000_000  # tokenizer and other side files
    for name in source.names():
        module = name.removesuffix(".weight")
        if module in plan.groups:
            rows, columns = source.linear_shape(module)
            group = plan.groups[module] if plan.groups[module] > 0 else columns
            total += rows * columns * plan.grid(module, settings)[0] // 8 + rows * (columns // group) * 3
        else:
            total += source.checkpoint.tensors[name].nbytes
    states = 0 if windows is None else 6 * 4 * windows.numel() * spec.hidden_size
    return total + min(total, SHARD_BYTES) + states


def estimate_repacked(checkpoint: Checkpoint) -> int:
    """The same of a repacking: packed bytes stay about as many."""
    total = checkpoint.disk_bytes() + 20_000_000
    return total + min(total, SHARD_BYTES)

"""One view of a checkpoint's weights, whatever their format: linear modules and plain tensors by name."""

from __future__ import annotations

import logging

import torch

from qengine.checkpoint import Checkpoint
from qengine.errors import CheckpointError
from qengine.quant.config import read_quant_config
from qengine.quant.formats import make_reader
from qengine.quant.plain import check_plain, load_plain
from qengine.quant.weights import LinearWeight, QuantizedWeight, QuantSpec

logger = logging.getLogger(__name__)

# Buffers that old exporters saved beside the weights; every model computes them itself.
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "k_scale", "v_scale", "q_scale", "kv_scale")


class WeightSource:
    """Weights of an opened checkpoint under the names in its files. Nothing is read before it is asked for.

    method: None for a plain checkpoint, else awq, gptq, compressed-tensors or auto-round. A tied embedding that the
    files leave out is answered from the head, and `X.weight` of a quantized module X is its dequantized weight.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = read_quant_config(checkpoint)
        self._tensors = checkpoint.tensors
        self._reader = make_reader(checkpoint, self.config)
        self._quantized = dict.fromkeys(self._reader.modules()) if self._reader else {}
        packed = {part for name in self._quantized for part in self._reader.parts(name)} if self._reader else set()
        self._plain = [name for name in self._tensors if name not in packed and not name.endswith(_BUFFERS)]
        self._plain_set = set(self._plain)
        self._tied = self._find_tied()

    @property
    def method(self) -> str | None:
        """None, "awq", "gptq", "compressed-tensors" or "auto-round"."""
        return self._reader.method if self._reader else None

    def names(self) -> list[str]:
        """Quantized modules ("...q_proj") and plain tensors ("...norm.weight"), in the order of the files."""
        return [*self._quantized, *self._plain]

    def quantized_modules(self) -> list[str]:
        """Dotted names of the quantized linear modules."""
        return list(self._quantized)

    def plain_tensors(self) -> list[str]:
        """Full names of the tensors that are stored unquantized, biases of quantized modules included."""
        return list(self._plain)

    def module_bytes(self, name: str) -> int:
        """Bytes that module `name` takes in the files, bias included."""
        parts = self._reader.parts(name) if self._reader and name in self._quantized else [f"{name}.weight"]
        return sum(self._tensors[part].nbytes for part in [*parts, f"{name}.bias"] if part in self._tensors)

    def has_linear(self, name: str) -> bool:
        """Whether module `name`, such as model.layers.0.self_attn.q_proj, has a weight, quantized or not."""
        return name in self._quantized or f"{name}.weight" in self._plain_set

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(N, K) of module `name`, from headers."""
        if self._reader and name in self._quantized:
            return self._reader.check(name)
        self._require(name)
        shape = self._tensors[f"{name}.weight"].shape
        if len(shape) != 2:
            raise CheckpointError(f"{name}: weight has shape {list(shape)}, expected [out_features, in_features]")
        return shape[0], shape[1]

    def linear_spec(self, name: str) -> QuantSpec | None:
        """How module `name` is quantized; None if it is not. Reads headers and, at most, zero points."""
        if self._reader and name in self._quantized:
            return self._reader.spec(name)
        self._require(name)
        return None

    def linear(self, name: str, device: torch.device | None = None) -> LinearWeight:
        """Module `name` unpacked: [N, K]. CheckpointError if absent, UnsupportedError if not servable.

        device: where it is unpacked, from packed tensors copied there; None is the CPU, without a copy.
        """
        if device is not None and device.type != "cpu":
            with self._tensors.placed_on(device):
                return self.linear(name)
        if self._reader and name in self._quantized:
            return self._reader.load(name)
        self._require(name)
        return load_plain(self._tensors, name)

    def _require(self, name: str) -> None:
        if not self.has_linear(name):
            raise CheckpointError(
                f"{name}: the checkpoint holds no weight for this module; download or convert it again"
            )

    def has(self, name: str) -> bool:
        """Whether plain tensor `name`, such as model.norm.weight, can be had."""
        return name in self._plain_set or self._module_of(name) is not None

    def tensor(self, name: str) -> torch.Tensor:
        """Plain tensor `name` as stored. CheckpointError if absent."""
        if name in self._plain_set:
            self._check_plain(name)
            return self._tensors.load(name)
        module = self._module_of(name)
        if module is None:
            raise CheckpointError(f"{name}: the checkpoint holds no such tensor; download or convert it again")
        weight = self.linear(module)
        if isinstance(weight, QuantizedWeight):
            return weight.dequantize(weight.scales.dtype)
        return weight.weight

    def _module_of(self, tensor: str) -> str | None:
        """The module whose weight stands for `tensor`: a quantized one, or the head that a missing embedding is tied
        to."""
        if not tensor.endswith(".weight"):
            return None
        module = tensor.removesuffix(".weight")
        if module in self._quantized:
            return module
        return self._tied.get(module)

    def _find_tied(self) -> dict[str, str]:
        heads = [name for name in (*self._quantized, *self._plain) if name.removesuffix(".weight").endswith("lm_head")]
        present = any(".".join(n.split(".")[-2:-1]) == "embed_tokens" for n in self._plain)
        present = present or any(n.endswith("embed_tokens") for n in self._quantized)
        if present or not heads or not self.checkpoint.text_config().get("tie_word_embeddings", False):
            return {}
        head = heads[0].removesuffix(".weight")
        prefix = next((n.split("layers.")[0] for n in (*self._quantized, *self._plain) if "layers." in n), "model.")
        logger.warning("%sembed_tokens is not in the checkpoint: it is tied to %s, whose weight is used", prefix, head)
        return {f"{prefix}embed_tokens": head}

    def tied_embeddings(self) -> dict[str, str]:
        """Embedding modules that the files leave out -> the head module whose weight they share."""
        return dict(self._tied)

    def check(self) -> None:
        """Check every layer from the files' headers (and g_idx), before memory is taken.

        Raises UnsupportedError for what cannot be served and CheckpointError for what does not fit together; the
        message names the layer, the reason and the remedy.
        """
        if self._reader:
            self._reader.check_model()
            for name in self._quantized:
                self._reader.check(name)
        for name in self._plain:
            self._check_plain(name)

    def _check_plain(self, name: str) -> None:
        """Integer buffers such as position_ids are harmless; a weight must be of a dtype to compute with."""
        info = self._tensors[name]
        if name.endswith(".weight") or info.dtype.is_floating_point:
            check_plain(name, info)


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The checkpoint's weights. Reads the quantization config; what cannot be served is said by `check()`."""
    return WeightSource(checkpoint)

"""Builds decoders from a checkpoint's weights, one layer in memory at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from qengine.checkpoint import Checkpoint
from qengine.errors import CheckpointError
from qengine.layers.activation import GatedActivation, gated_activation
from qengine.layers.embedding import Embedding
from qengine.layers.int8_weight import quantize_int8
from qengine.layers.join import fold_order, join_weights
from qengine.layers.kept_memory import collect_kept, memory_pool
from qengine.layers.linear import Linear, Split
from qengine.layers.norm import HeadNorm, LayerNorm, Norm, RMSNorm
from qengine.layers.rope import Rope, RopeSpec
from qengine.models.decoder import MLP, Attention, Decoder, DecoderLayer
from qengine.models.registry import model_spec
from qengine.models.spec import ModelSpec
from qengine.quant import LinearWeight, PlainWeight, WeightSource, open_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where and how the two largest dense matrices are held: see ModelConfig.embedding_on_host and lm_head_dtype."""

    embedding_on_host: bool = False
    int8_head: bool = False


def load_model(
    ckpt: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    placement: Placement | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """The checkpoint's model on `device`, computing in `dtype`. progress(done, total) is called after each layer.

    watch: called with the model after each layer too, when it has all but the layers that are still to come.

    Everything is checked before memory is taken. Raises CheckpointError and UnsupportedError, with the layer's name.
    """
    spec = model_spec(ckpt)
    source = open_weights(ckpt)
    source.check()
    check_weights(source, spec)
    loader = _Loader(source, spec, dtype, torch.device(device))
    memory = memory_pool(loader.device)
    with collect_kept(memory):
        # first, while there is most room: to quantize the head takes it a second time
        head, embedding = loader.head_and_embedding(placement or Placement())
        norm = loader.norm(f"{spec.prefix}norm")
        model = Decoder(spec, dtype, loader.device, embedding, [], norm, head)
        model.memory = memory
        for index in range(spec.num_layers):
            model.layers.append(loader.layer(index, fuse=True))
            if progress is not None:
                progress(index + 1, spec.num_layers)
            if watch is not None:
                watch(model)
    return model


def load_layer(
    source: WeightSource,
    spec: ModelSpec,
    index: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    fuse: bool = False,
) -> DecoderLayer:
    """Layer `index` alone. fuse: join linears that read the same input; without it `linears()` has each by its name."""
    return _Loader(source, spec, dtype, torch.device(device)).layer(index, fuse)


def load_final_norm(source: WeightSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Norm:
    """The norm before the output head."""
    return _Loader(source, spec, dtype, device).norm(f"{spec.prefix}norm")


def load_ends(
    source: WeightSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[Embedding, Norm, Linear]:
    """What is before and after the layers: embedding, final norm, output head."""
    head, embedding = _Loader(source, spec, dtype, device).head_and_embedding(Placement())
    return embedding, load_final_norm(source, spec, dtype, device), head


def check_weights(source: WeightSource, spec: ModelSpec) -> None:
    """Compare the shapes in the files' headers with the config. Raises CheckpointError with the layer's name."""
    for index in range(spec.num_layers):
        start = f"{spec.prefix}layers.{index}."
        for name, shape in spec.linear_shapes().items():
            _check_shape(f"{start}{name}", source.linear_shape(f"{start}{name}"), shape)
            if name in spec.biases and not source.has(f"{start}{name}.bias"):
                raise CheckpointError(f"{start}{name}: its bias is missing from the checkpoint; download it again")
        for norm in astuple(spec.norms):
            if norm is not None:
                _check_norm(source, f"{start}{norm}", spec)
    _check_norm(source, f"{spec.prefix}norm", spec)
    embedding, shape = f"{spec.prefix}embed_tokens", (spec.vocab_size, spec.hidden_size)
    _check_shape(embedding, source.linear_shape(source.tied_embeddings().get(embedding, embedding)), shape)
    if not tied_to_embedding(source, spec):
        _check_shape(spec.head_name, source.linear_shape(spec.head_name), shape)


def _check_norm(source: WeightSource, name: str, spec: ModelSpec) -> None:
    info = source.checkpoint.tensors.get(f"{name}.weight")
    if info is None:
        raise CheckpointError(f"{name}.weight: is missing from the checkpoint; download or convert it again")
    _check_shape(f"{name}.weight", info.shape, (spec.hidden_size,))


def tied_to_embedding(source: WeightSource, spec: ModelSpec) -> bool:
    """Whether the embedding is the output head: so the config says, and the files have no other head.

    As in transformers, a head in the files that is quantized, or differs from the embedding, goes before the config.
    """
    if not spec.tied_head or not source.has_linear(spec.head_name):
        return spec.tied_head
    if source.linear_spec(spec.head_name) is not None:
        return False
    embedding = f"{spec.prefix}embed_tokens"
    if embedding in source.tied_embeddings():
        return True
    head, table = source.tensor(f"{spec.head_name}.weight"), source.tensor(f"{embedding}.weight")
    return head.dtype == table.dtype and torch.equal(head, table)


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != expected:
        raise CheckpointError(
            f"{name}: its weight is {list(got)} in the checkpoint, but config.json asks for {list(expected)}; "
            "the files are of another model, or the config was changed"
        )


class _Loader:
    """Loads parts of one model with one dtype, device and set of ropes."""

    def __init__(self, source: WeightSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.wide = torch.float32 if spec.residual_float32 else dtype
        self._ropes: list[tuple[RopeSpec, Rope]] = []

    def layer(self, index: int, fuse: bool) -> DecoderLayer:
        """Decoder layer `index`."""
        spec, start = self.spec, f"{self.spec.prefix}layers.{index}."
        linears: dict[str, Linear] = {}
        qkv = ["qkv_proj"] if spec.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if spec.fused_gate_up else ["gate_proj", "up_proj"]
        attention_inputs = self._linears(start, "self_attn", qkv, "columns", fuse, linears)
        attention_output = self._linears(start, "self_attn", ["o_proj"], "rows", fuse, linears)[0]
        gates, down = self._weights(start, "mlp", gate_up), self._weights(start, "mlp", ["down_proj"])
        if fuse:
            # between them is nothing but an element-wise function, and nothing else reads what gate and up give
            gates, down[0] = fold_order(gates, down[0])
        act = gated_activation(spec.activation)
        mlp_inputs = self._linears(start, "mlp", gate_up, "columns", fuse, linears, gates, act)
        mlp_output = self._linears(start, "mlp", ["down_proj"], "rows", fuse, linears, down)[0]
        head_norm, full_norms = self._qk_norms(f"{start}self_attn.")
        attention = Attention(spec, index, attention_inputs, attention_output, head_norm, full_norms)
        mlp = MLP(act, mlp_inputs, mlp_output)
        names = spec.norms
        places = (
            (names.attention_in, self.dtype),
            (names.attention_out, self.wide),
            (names.mlp_in, self.dtype),
            (names.mlp_out, self.wide),
        )
        first, second, third, fourth = (None if n is None else self.norm(start + n, out) for n, out in places)
        rope = self._rope(spec.layers[index].rope)
        return DecoderLayer(spec, self.dtype, attention, mlp, (first, second, third, fourth), rope, linears)

    def _weights(self, start: str, block: str, names: list[str]) -> list[LinearWeight]:
        return [self._weight(f"{start}{block}.{name}", f"{block}.{name}") for name in names]

    def _linears(
        self,
        start: str,
        block: str,
        names: list[str],
        split: Split,
        fuse: bool,
        into: dict[str, Linear],
        weights: list[LinearWeight] | None = None,
        act: GatedActivation | None = None,
    ) -> list[Linear]:
        """The named linears of a block, joined if asked for and possible; also put into `into` by relative name.

        act: they are a gate and what it gates; where they are one linear, it computes act(gate) * up.
        """
        weights = self._weights(start, block, names) if weights is None else weights
        joined = join_weights(weights) if fuse and len(weights) > 1 else None
        parts = {"+".join(names): joined} if joined is not None else dict(zip(names, weights, strict=True))
        made, gate = [], act if len(parts) == 1 else None
        for name, weight in parts.items():
            linear = Linear(
                f"{start}{block}.{name}", weight, dtype=self.dtype, device=self.device, split=split, gate=gate
            )
            into[f"{block}.{name}"] = linear
            made.append(linear)
        return made

    def _weight(self, name: str, relative: str) -> LinearWeight:
        weight = self.source.linear(name, self.device)
        shape = self.spec.linear_shapes()[relative]
        _check_shape(name, weight.weight.shape if isinstance(weight, PlainWeight) else weight.shape, shape)
        if weight.bias is not None and tuple(weight.bias.shape) != (shape[0],):
            raise CheckpointError(f"{name}: its bias has shape {list(weight.bias.shape)}, expected [{shape[0]}]")
        return weight

    def norm(self, name: str, out_dtype: torch.dtype | None = None) -> Norm:
        """The norm called `name`, over the hidden size."""
        size, out_dtype = self.spec.hidden_size, out_dtype or self.dtype
        if self.spec.norm_kind == "rms":
            return self._rms_norm(name, size, out_dtype)
        weight = self._vector(f"{name}.weight", size)
        bias = self._vector(f"{name}.bias", size).to(self.wide) if self.source.has(f"{name}.bias") else None
        return LayerNorm(weight.to(self.wide), bias, self.spec.norm_eps, out_dtype)

    def _rms_norm(self, name: str, size: int, out_dtype: torch.dtype) -> RMSNorm:
        # The offset is added in float32: in a narrow dtype 1 + w would lose most of w.
        weight = self._vector(f"{name}.weight", size).float() + self.spec.norm_offset
        return RMSNorm(weight.to(self.wide), self.spec.norm_eps, out_dtype)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        value = self.source.tensor(name)
        if tuple(value.shape) != (size,):
            raise CheckpointError(f"{name}: has shape {list(value.shape)}, but config.json asks for [{size}]")
        return value.to(self.device, copy=True)

    def _qk_norms(self, start: str) -> tuple[HeadNorm | None, tuple[RMSNorm, RMSNorm] | None]:
        spec, size = self.spec, self.spec.head_dim
        counts = (spec.num_heads, spec.num_kv_heads)
        if spec.qk_norm == "head":
            q, k = (self._vector(f"{start}{x}_norm.weight", size) for x in "qk")
            rows = (q.expand(counts[0], size), k.expand(counts[1], size))
            return HeadNorm((torch.cat(rows).float() + spec.norm_offset).to(self.wide), spec.norm_eps, "rms"), None
        if spec.qk_norm == "per_head":
            heads = [f"{x}_layernorm.norms.{i}" for x, n in zip("qk", counts, strict=True) for i in range(n)]
            weight = torch.stack([self._vector(f"{start}{head}.weight", size) for head in heads])
            return HeadNorm(weight.to(self.wide), spec.norm_eps, "layer"), None
        if spec.qk_norm == "full":
            return None, (
                self._rms_norm(f"{start}q_norm", counts[0] * size, self.dtype),
                self._rms_norm(f"{start}k_norm", counts[1] * size, self.dtype),
            )
        return None, None

    def _rope(self, spec: RopeSpec | None) -> Rope | None:
        """The Rope for a RopeSpec; layers with equal ones share it, and with it the angles of a step."""
        if spec is None:
            return None
        for known, rope in self._ropes:
            if known == spec:
                return rope
        rope = Rope(spec, self.device)
        self._ropes.append((spec, rope))
        return rope

    def head_and_embedding(self, placement: Placement) -> tuple[Linear, Embedding]:
        """The output head and the embedding; they share memory where the head is tied, dense and on the same device."""
        spec, name = self.spec, f"{self.spec.prefix}embed_tokens.weight"
        table = self.source.tensor(name)
        expected = (spec.vocab_size, spec.hidden_size)
        _check_shape(name, tuple(table.shape), expected)
        if tied_to_embedding(self.source, spec):
            weight: LinearWeight = PlainWeight(table)
        else:
            if spec.tied_head and self.source.linear_spec(spec.head_name) is None:
                text = "config.json ties %s to the embedding, but the files hold a different head, which is used"
                logger.warning(text, spec.head_name)
            _check_shape(spec.head_name, self.source.linear_shape(spec.head_name), expected)
            weight = self.source.linear(spec.head_name, self.device)
        tied = isinstance(weight, PlainWeight) and weight.weight is table
        if placement.int8_head and isinstance(weight, PlainWeight):
            weight = quantize_int8(weight.weight.to(self.device), weight.bias)
        head = Linear(spec.head_name, weight, dtype=self.dtype, device=self.device, split="columns")
        shared = head.dense_weight() if tied and not placement.embedding_on_host else None
        if shared is None:
            narrow = table.dtype if table.dtype.itemsize < self.dtype.itemsize else self.dtype
            place = torch.device("cpu") if placement.embedding_on_host else self.device
            shared = table.to(place, narrow, copy=True)
            if placement.embedding_on_host and self.device.type == "cuda":
                shared = shared.pin_memory()
        scale = float(torch.tensor(spec.embed_scale).to(self.dtype))
        return head, Embedding(shared, scale, self.wide, self.device)

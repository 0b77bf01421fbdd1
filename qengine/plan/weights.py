"""What a model's matrices take on a GPU, each by the implementation that would hold it, from headers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qengine.checkpoint import Checkpoint
from qengine.kernels.w4a16.layout import PLANE, servable_group
from qengine.layers.int8_weight import GROUP_SIZE as HEAD_GROUP
from qengine.models import model_spec
from qengine.models.loading import check_weights, tied_to_embedding
from qengine.models.paths import linear_paths
from qengine.models.spec import ModelSpec
from qengine.quant import QuantSpec, WeightSource, open_weights


@dataclass(frozen=True)
class Matrix:
    """One linear layer as it is held. bits: 4 or 8 as packed, 16 for a dense one. group: columns a scale, 0 for one.

    fused: computed by the packed kernel, or by a plain product.
    """

    name: str
    n: int
    k: int
    bits: int
    group: int
    nbytes: int
    fused: bool


@dataclass(frozen=True)
class ModelWeights:
    """A model's matrices and what they take, in bytes. layers: those of each decoder layer.

    embedding_bytes: 0 where the head shares the table. vectors: norms and biases. tied: the embedding is the head.
    """

    spec: ModelSpec
    layers: tuple[tuple[Matrix, ...], ...]
    head: Matrix
    embedding_bytes: int
    vectors: int
    tied: bool
    method: str | None

    @property
    def layer_bytes(self) -> int:
        """All decoder layers' matrices."""
        return sum(matrix.nbytes for layer in self.layers for matrix in layer)


def packed_bytes(n: int, k: int, bits: int, group: int, *, sorted_columns: bool = False) -> int:
    """Bytes of an N x K weight in the packed layout of kernels/w4a16 (`bits` 2 to 8 of the checkpoint).

    group: columns a scale in the checkpoint, -1 for one. sorted_columns: with the permutation of an act-order layer.
    """
    stored = 4 if bits <= 4 else 8
    block = PLANE * (16 // stored)
    columns = math.ceil(k / block) * block
    rows = math.ceil(n / 16) * 16
    size = servable_group(group if 0 < group < k else k, k)
    groups = math.ceil(columns / size) if size else 1
    return rows * columns * stored // 8 + rows * groups * 4 + (4 * columns if sorted_columns else 0)


def model_weights(ckpt: Checkpoint, *, dtype: torch.dtype, int8_head: bool, embedding_on_host: bool) -> ModelWeights:
    """Read the headers. Raises CheckpointError and UnsupportedError as loading would."""
    spec, source = model_spec(ckpt), open_weights(ckpt)
    source.check()
    check_weights(source, spec)
    fused = {
        (row["name"], tuple(row["shape"]), row["weights"])
        for row in linear_paths(ckpt, device="cuda", dtype=dtype)
        if row["path"] == "w4a16"
    }
    names = {name for name, _, _ in fused}
    layers = tuple(
        tuple(
            _matrix(source, f"{spec.prefix}layers.{index}.{name}", dtype, name in names)
            for name in spec.linear_shapes()
        )
        for index in range(spec.num_layers)
    )
    tied = tied_to_embedding(source, spec)
    head = _head(source, spec, dtype, tied, int8_head)
    shared = tied and head.bits == 16 and not embedding_on_host
    table = 0 if shared else spec.vocab_size * spec.hidden_size * dtype.itemsize
    return ModelWeights(spec, layers, head, table, _vectors(spec, dtype), tied, source.method)


def _matrix(source: WeightSource, module: str, dtype: torch.dtype, fused: bool) -> Matrix:
    (n, k), quant = source.linear_shape(module), source.linear_spec(module)
    if quant is None:
        return Matrix(module, n, k, 16, 0, n * k * dtype.itemsize, False)
    if fused:
        return _packed(module, n, k, quant)
    groups = math.ceil(k / quant.group_size) if quant.group_size > 0 else 1
    codes = n * math.ceil(k / 2) if quant.bits <= 4 else n * k
    # codes, scales and zeros of two bytes, and the group of each column
    return Matrix(module, n, k, 16, 0, codes + 4 * n * groups + 8 * k, False)


def _packed(name: str, n: int, k: int, quant: QuantSpec) -> Matrix:
    size = quant.group_size if 0 < quant.group_size < k else k
    nbytes = packed_bytes(n, k, quant.bits, quant.group_size, sorted_columns=quant.desc_act)
    return Matrix(name, n, k, 4 if quant.bits <= 4 else 8, servable_group(size, k), nbytes, True)


def _head(source: WeightSource, spec: ModelSpec, dtype: torch.dtype, tied: bool, int8: bool) -> Matrix:
    n, k = spec.vocab_size, spec.hidden_size
    quant = None if tied else source.linear_spec(spec.head_name)
    if quant is not None:
        return _packed(spec.head_name, n, k, quant)
    if int8:
        return _packed(spec.head_name, n, k, QuantSpec(8, HEAD_GROUP, True, False, "qengine", "rtn"))
    return Matrix(spec.head_name, n, k, 16, 0, n * k * dtype.itemsize, False)


def _vectors(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Norm weights and biases, as many as the families usually have; a thousandth of the whole."""
    norms = spec.num_layers * (2 if spec.norm_placement != "sandwich" else 4) + 1
    shapes = spec.linear_shapes()
    biases = spec.num_layers * sum(shapes[name][0] for name in spec.biases if name in shapes)
    return (norms * spec.hidden_size + biases) * dtype.itemsize

"""Decoder-only language models, described by data and run by one decoder."""

from qengine.models.decoder import Decoder, DecoderLayer
from qengine.models.loading import load_layer, load_model
from qengine.models.paths import linear_paths
from qengine.models.registry import ARCHITECTURES, model_spec
from qengine.models.spec import LayerSpec, ModelSpec

__all__ = [
    "ARCHITECTURES",
    "Decoder",
    "DecoderLayer",
    "LayerSpec",
    "ModelSpec",
    "linear_paths",
    "load_layer",
    "load_model",
    "model_spec",
]

"""Hugging Face folders and hub ids: config and named, memory-mapped tensors."""

from qengine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qengine.checkpoint.safetensors_file import TensorInfo
from qengine.checkpoint.tensors import TensorStore

__all__ = ["Checkpoint", "TensorInfo", "TensorStore", "open_checkpoint"]

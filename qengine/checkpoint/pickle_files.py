"""PyTorch pickle files (*.bin, *.pt): opened only when asked for by name, and then with weights_only."""

from __future__ import annotations

from pathlib import Path

import torch

from qengine.checkpoint.tensors import TensorStore
from qengine.errors import CheckpointError


def load_pickles(files: list[Path]) -> TensorStore:
    """All tensors of the files. torch.load(weights_only=True): nothing in the pickle can run code."""
    tensors: dict[str, torch.Tensor] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        for name, tensor in _load(file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is in {file_of[name].name} and in {file.name}; keep one copy")
            tensors[name], file_of[name] = tensor, file
    return TensorStore.from_loaded(tensors, file_of)


def _load(file: Path) -> dict[str, torch.Tensor]:
    # torch.load raises almost any type for damaged input, hence the wide net; all of it means the same to the user.
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file}: is damaged or holds more than tensors ({first}); convert it to safetensors with a tool that "
            "you trust"
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise CheckpointError(f"{file}: holds a {type(state).__name__}, expected a dictionary of tensors")
    return {str(name): tensor.detach() for name, tensor in state.items()}

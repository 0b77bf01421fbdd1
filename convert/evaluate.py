"""Perplexity of a checkpoint of any size: all windows go through one layer, then the next is loaded."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qengine.checkpoint import Checkpoint, open_checkpoint
from qengine.convert.activations import Activations, fitting
from qengine.convert.calibration import bundled_text, load_tokenizer
from qengine.errors import ConfigError
from qengine.kernels.fused.ref import softcap
from qengine.layers.attention import DenseContext
from qengine.layers.linear import Linear
from qengine.layers.norm import Norm
from qengine.models import load_layer, model_spec
from qengine.models.loading import load_ends
from qengine.models.spec import ModelSpec
from qengine.quant import open_weights

WINDOWS = 24
SEQ_LEN = 2048
LOGIT_ROWS = 128


@dataclass(frozen=True)
class Evaluation:
    """Perplexity before and after, on `windows` windows of `seq_len` tokens of the bundled evaluation text."""

    before: float
    after: float
    windows: int
    seq_len: int


def evaluate_conversion(
    source: Path, made: Path, device: torch.device, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """Score both folders in float32. Raises ConfigError if the text is too short for the model's tokenizer."""
    checkpoint = open_checkpoint(source)
    spec = model_spec(checkpoint)
    seq_len = min(SEQ_LEN, spec.max_position)
    text = bundled_text("evaluation.txt")
    ids = load_tokenizer(source)(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = min(WINDOWS, len(ids) // seq_len)
    if windows < 1:
        raise ConfigError(f"--evaluate: the text has {len(ids)} tokens, less than one window of {seq_len}")
    tokens = torch.tensor(ids[: windows * seq_len]).reshape(windows, seq_len)
    steps = 2 * spec.num_layers
    before, after = (
        streamed_perplexity(open_checkpoint(folder), tokens, device, _shifted(progress, turn * spec.num_layers, steps))
        for turn, folder in enumerate((source, made))
    )
    return Evaluation(before, after, windows, seq_len)


def _shifted(progress: Callable[[int, int], None] | None, done: int, total: int) -> Callable[[int], None]:
    return lambda layers: progress(done + layers, total) if progress else None


@torch.inference_mode()
def streamed_perplexity(
    checkpoint: Checkpoint, tokens: torch.Tensor, device: torch.device, progress: Callable[[int], None] | None = None
) -> float:
    """exp of the mean loss over tokens int64 [S, L], each window on its own, its first token context only.

    One layer is in memory at a time, in float32. progress(layers done).
    """
    spec, source = model_spec(checkpoint), open_weights(checkpoint)
    count, length = tokens.shape
    embedding, norm, head = load_ends(source, spec, torch.float32, device)
    shape = (count, length, spec.hidden_size)
    with tempfile.TemporaryDirectory() as scratch:
        states = Activations(shape, device, fitting(shape, device, 1)[0], lambda: Path(scratch) / "states.bin")
        for window in range(count):
            states.write(window, embedding(tokens[window].to(device)).float().unsqueeze(0))
        positions = torch.arange(length, device=device)
        for index in range(spec.num_layers):
            layer = load_layer(source, spec, index, dtype=torch.float32, device=device, fuse=False)
            for window in range(count):
                hidden = states.read(window, window + 1)[0]
                states.write(window, layer(hidden, positions, DenseContext(1, length)).unsqueeze(0))
            checkpoint.tensors.close()
            if progress is not None:
                progress(index + 1)
        total = sum(
            _loss(states.read(window, window + 1)[0], tokens[window].to(device), norm, head, spec)
            for window in range(count)
        )
    loss = total / (count * (length - 1))
    return math.exp(loss) if loss < 700 else math.inf


def _loss(hidden: torch.Tensor, window: torch.Tensor, norm: Norm, head: Linear, spec: ModelSpec) -> float:
    """Sum of -log p over the tokens of one window but the first."""
    hidden, total = norm(hidden), 0.0
    for start in range(0, window.shape[0] - 1, LOGIT_ROWS):
        end = min(start + LOGIT_ROWS, window.shape[0] - 1)
        logits = head(hidden[start:end]).float()
        if spec.logit_softcap is not None:
            logits = softcap(logits, spec.logit_softcap)
        picked = logits.log_softmax(dim=-1).gather(1, window[start + 1 : end + 1, None])
        total -= float(picked.sum(dtype=torch.float64))
    return total

"""Tiny random models of every family, made by transformers, and decoding of them with caches of our own."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from qengine.checkpoint import open_checkpoint
from qengine.layers.attention import DenseContext, KVCache, PagedBatch, PagedContext
from qengine.models import Decoder, load_model

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# family -> (transformers class, what its config has besides _BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama1": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 6, "head_dim": 6}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-12b": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True, "hidden_size": 64}),
    "glm": ("Glm", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "glm4": ("Glm4", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
}


def tiny(family: str, seed: int = 0, **overrides: Any) -> tuple[Any, Path]:
    """(transformers' float32 model, the folder it is saved in); norms and biases are random too, so mistakes show."""
    name, fields = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**{**_BASE, **fields, **overrides})
    # Gemma 2's own default; with any other, transformers leaves out the soft cap.
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model, save(randomize(model))


def randomize(model: Any) -> Any:
    """Give every parameter random values of a size at which all of them matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def save(model: Any) -> Path:
    """The model in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of the folder, on the CPU."""
    return load_model(open_checkpoint(folder), dtype=dtype, device="cpu")


@torch.no_grad()
def dense_logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits [L, V] of one prompt [L], without a cache."""
    positions = torch.arange(len(ids), device=ids.device)
    return model.logits(model.forward(ids, positions, DenseContext(1, len(ids))))


@torch.no_grad()
def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits [L, V] of one prompt [L], without a cache."""
    return model(ids[None], use_cache=False).logits[0].float()


class PagedRun:
    """Sequences decoded through a paged cache whose blocks are dealt at random, as an engine does it."""

    def __init__(self, model: Decoder, capacity: list[int], block_size: int = 4, seed: int = 1) -> None:
        self.model = model
        self.size = block_size
        blocks = [-(-tokens // block_size) for tokens in capacity]
        total = sum(blocks) + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]
        self.cached = [0] * len(capacity)
        self.cache = KVCache.allocate(model.spec, total, block_size, model.dtype, model.device)
        for layer in (*self.cache.k, *self.cache.v):  # what is never written must never matter
            layer.fill_(1e4)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.size] * self.size + position % self.size

    @torch.no_grad()
    def step(self, parts: dict[int, torch.Tensor], prompts: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        """Feed some sequences new tokens; logits [n, V] of each. prompts: whole prompt lengths of sequences."""
        rows = list(parts)
        counts = [len(parts[row]) for row in rows]
        contexts = [self.cached[row] for row in rows]
        places = [range(c, c + n) for c, n in zip(contexts, counts, strict=True)]
        slots = [self._slot(row, p) for row, span in zip(rows, places, strict=True) for p in span]
        widest = max(len(self.tables[row]) for row in rows)
        tables = torch.tensor([self.tables[r] + [0] * (widest - len(self.tables[r])) for r in rows], dtype=torch.int32)
        lengths = None if prompts is None else [prompts.get(row, 0) for row in rows]
        batch = PagedBatch(counts, contexts, tables, torch.tensor(slots), lengths)
        positions = torch.tensor([p for ps in places for p in ps])
        hidden = self.model.forward(torch.cat([parts[r] for r in rows]), positions, PagedContext(self.cache, batch))
        for row, count in zip(rows, counts, strict=True):
            self.cached[row] += count
        return dict(zip(rows, self.model.logits(hidden).split(counts), strict=True))

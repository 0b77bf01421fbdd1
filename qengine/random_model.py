"""Random AWQ INT4 checkpoints of well-known shapes, for benchmarks: no download, and as fast as real ones.

`random:llama-2-7b` is a model's name wherever a folder is: `LLM("random:llama-2-7b", skip_tokenizer_init=True)` makes
each tensor on the device when it is asked for and touches no disk. As files, for other engines and for start-up times:

    python -m qengine.random_model llama-2-7b ./llama-2-7b-random
    python -m qengine.random_model --list

A tensor depends on the shape, the seed and its own name (and on the kind of device: a GPU's generator differs from a
CPU's), so two runs have the same model. Weights have the variance of trained ones, so that activations stay finite.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import math
import sys
from pathlib import Path
from typing import Any

import torch

from qengine.checkpoint import Checkpoint, TensorInfo, TensorStore
from qengine.checkpoint.writer import Entry, new_folder, write_json, write_shards
from qengine.errors import ConfigError

PREFIX = "random:"
SPREAD = 4.6
"""Standard deviation of a uniform code from 0 to 15 around its zero point."""

_COMMON = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float16"}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON, "bos_token_id": 1, "eos_token_id": 2}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    **_COMMON,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3 = {**_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960}


def _size(
    base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A config.json: sizes from the models' own published ones."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    return {**base, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv, **more}


_LLAMA3 = {**_LLAMA, "rope_theta": 5e5, "bos_token_id": 128000, "eos_token_id": 128001}
_SCALED = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_SMALL_SCALED = {**_SCALED, "rope_scaling": {**_SCALED["rope_scaling"], "factor": 32.0}}  # type: ignore[dict-item]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _size(_LLAMA, 4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "llama-2-13b": _size(_LLAMA, 5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096),
    "llama-3-8b": _size(_LLAMA3, 4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192),
    "llama-3.1-8b": _size(_LLAMA3, 4096, 14336, 32, 32, 8, 128256, **_SCALED),
    "llama-3.2-1b": _size(
        _LLAMA3, 2048, 8192, 16, 32, 8, 128256, **_SMALL_SCALED, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _size(
        _LLAMA3, 3072, 8192, 28, 24, 8, 128256, **_SMALL_SCALED, head_dim=128, tie_word_embeddings=True
    ),
    "mistral-7b": _size(
        {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        4096, 14336, 32, 32, 8, 32768, max_position_embeddings=32768, rope_theta=1e6, sliding_window=None,
    ),
    "qwen2.5-0.5b": _size(_QWEN2, 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _size(_QWEN2, 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-3b": _size(_QWEN2, 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _size(_QWEN2, 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _size(_QWEN2, 5120, 13824, 48, 40, 8, 152064),
    "qwen3-4b": _size(_QWEN3, 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _size(_QWEN3, 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _size(_QWEN3, 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "smollm2-135m": _size(
        _LLAMA, 576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True
    ),
    "tiny": _size(_LLAMA, 128, 256, 2, 4, 2, 512, max_position_embeddings=4096),
}  # fmt: skip
"""Names that `random:NAME` and --shape take, and the config.json of each. "tiny" is for trying things out on a CPU."""


def is_random(model: str) -> bool:
    """Whether a model's name asks for random weights."""
    return model.startswith(PREFIX)


def shape_config(name: str) -> dict[str, Any]:
    """The config.json of shape `name` (with or without "random:"), its quantization included. Raises ConfigError."""
    key = name.removeprefix(PREFIX).lower()
    if key not in SHAPES:
        near = difflib.get_close_matches(key, SHAPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"shape {key!r} is not known; {hint} known are {', '.join(SHAPES)}".replace("  ", " "))
    config = dict(SHAPES[key])
    group = 128 if config["hidden_size"] % 128 == 0 else 64
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    return config


def tensor_entries(config: dict[str, Any]) -> list[Entry]:
    """Every tensor of a checkpoint with this config: name, dtype and shape, in the order of the model."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    group, half = config["quantization_config"]["group_size"], torch.float16
    qwen2, qwen3 = (config["model_type"] == name for name in ("qwen2", "qwen3"))
    linears = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    table = (config["vocab_size"], hidden)
    entries = [Entry("model.embed_tokens.weight", half, table)]
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, (k, n) in linears.items():
            entries.append(Entry(f"{start}{name}.qweight", torch.int32, (k, n // 8)))
            entries.append(Entry(f"{start}{name}.qzeros", torch.int32, (k // group, n // 8)))
            entries.append(Entry(f"{start}{name}.scales", half, (k // group, n)))
            if qwen2 and name.endswith(("q_proj", "k_proj", "v_proj")):
                entries.append(Entry(f"{start}{name}.bias", half, (n,)))
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim} if qwen3 else {}
        entries += [Entry(f"{start}{name}.weight", half, (size,)) for name, size in norms.items()]
    entries.append(Entry("model.norm.weight", half, (hidden,)))
    if not config["tie_word_embeddings"]:
        entries.append(Entry("lm_head.weight", half, table))
    return entries


def random_tensor(entry: Entry, config: dict[str, Any], device: torch.device | str, seed: int = 0) -> torch.Tensor:
    """The tensor of `entry` on `device`; the same for the same entry, config's sizes, seed and kind of device."""
    generator = torch.Generator(device=device)
    digest = hashlib.sha256(f"{seed}/{entry.name}/{list(entry.shape)}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:7], "little"))
    last = entry.name.rpartition(".")[2]
    if entry.dtype == torch.int32:
        words = torch.empty(entry.shape, dtype=torch.int32, device=device)
        words.random_(-(2**31), 2**31 - 1, generator=generator)
        # Zero points of 7 and 8, as often as each other: the mean of the codes.
        return (words & 0x11111111) + 0x77777777 if last == "qzeros" else words
    if last == "scales":
        columns = entry.shape[0] * config["quantization_config"]["group_size"]
        scales = torch.rand(entry.shape, generator=generator, device=device) + 0.5
        return (scales / (SPREAD * math.sqrt(columns))).to(entry.dtype)
    if "norm" in entry.name:
        return torch.ones(entry.shape, dtype=entry.dtype, device=device)
    values = torch.empty(entry.shape, dtype=entry.dtype, device=device).normal_(generator=generator)
    return values * (0.1 if last == "bias" else config["hidden_size"] ** -0.5)


class RandomStore(TensorStore):
    """A checkpoint's tensors, each made on `device` when it is loaded. There are no files."""

    def __init__(self, config: dict[str, Any], device: torch.device | str, seed: int = 0) -> None:
        super().__init__([])
        self._device = torch.device(device)
        self._entries = {entry.name: entry for entry in tensor_entries(config)}
        self._infos = {e.name: TensorInfo(e.dtype, e.shape, Path(PREFIX), e.nbytes) for e in self._entries.values()}
        self._config = config
        self._seed = seed

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """As TensorStore.load, but on the store's device, or that of `placed_on`."""
        if name not in self._entries:
            return super().load(name, rows)
        tensor = random_tensor(self._entries[name], self._config, self._device, self._seed)
        return tensor if rows is None else tensor[rows]


def random_checkpoint(name: str, device: torch.device | str, seed: int = 0) -> Checkpoint:
    """An opened checkpoint of shape `name` whose tensors are made on `device`. Raises ConfigError."""
    config = shape_config(name)
    path = Path(PREFIX + name.removeprefix(PREFIX).lower())
    return Checkpoint(path, config, RandomStore(config, device, seed), {})


def write_random_model(
    name: str, folder: Path, *, device: torch.device | str = "cpu", seed: int = 0, force: bool = False
) -> None:
    """Write shape `name` as a Hugging Face folder; tensors are made on `device`.

    Raises ConfigError for an unknown shape or a folder that is not empty (unless `force`), CheckpointError for a disk
    that cannot take it.
    """
    config = shape_config(name)
    store = RandomStore(config, device, seed)
    entries = tensor_entries(config)
    with new_folder(folder, force=force) as partial:
        write_shards(partial, entries, lambda tensor: store.load(tensor).cpu())
        write_json(partial / "config.json", config)


def main(arguments: list[str] | None = None) -> int:
    """The command line: write a shape to a folder."""
    parser = argparse.ArgumentParser(prog="python -m qengine.random_model", description="Write a random AWQ model.")
    parser.add_argument("shape", nargs="?", help="its name; --list prints them")
    parser.add_argument("folder", nargs="?", type=Path, help="where to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="makes the tensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace the folder")
    parser.add_argument("--list", action="store_true", help="print the known shapes")
    options = parser.parse_args(arguments)
    if options.list:
        for name in SHAPES:
            print(f"{name:14} {sum(e.nbytes for e in tensor_entries(shape_config(name))) / 2**30:6.2f} GiB")
        return 0
    if not options.shape or not options.folder:
        parser.error("give a shape and a folder, or --list")
    try:
        write_random_model(options.shape, options.folder, device=options.device, seed=options.seed, force=options.force)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

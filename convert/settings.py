"""What a conversion is asked to do: defaults, and the combinations that are refused before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qengine.convert.scheme import Scheme
from qengine.errors import ConfigError

METHODS = ("rtn", "awq", "gptq", "best")
FORMAT_BITS = {
    "awq-gemm": (4,),
    "gptq": (2, 3, 4, 8),
    "gptq_v2": (2, 3, 4, 8),
    "compressed-tensors": (2, 3, 4, 8),
}
FORMATS = tuple(FORMAT_BITS)
DEFAULT_GROUP = 128
# Calibration tokens: the second moment of a layer wants more rows than the layer is wide, a CPU wants fewer.
DEFAULT_SEQ_LEN = 512
DEFAULT_SAMPLES = {"cpu": 16, "cuda": 128}


@dataclass(frozen=True)
class ConvertSettings:
    """A checked conversion; make it with `resolve_settings`.

    method: rtn, awq, gptq or best. format: the output's packing. group_size: asked for, -1 one group a row. sym,
    desc_act: see Scheme and GPTQSettings. samples windows of seq_len tokens calibrate; seed draws them. device: where
    layers run. keep: (regular expression, bits) of modules that get other bits, 16 for none; the first that is found in
    a module's name counts.
    """

    method: str
    format: str
    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    samples: int
    seq_len: int
    seed: int
    device: str
    keep: tuple[tuple[str, int], ...] = ()

    def scheme(self, group_size: int, bits: int | None = None) -> Scheme:
        """The grid with a group size that fits."""
        return Scheme(bits or self.bits, group_size, self.sym, min_zero=1 if self.format == "gptq" else 0)

    def kept_bits(self, module: str) -> int | None:
        """Bits that `keep` gives a module, None for the model's own."""
        return next((bits for pattern, bits in self.keep if re.search(pattern, module)), None)


def resolve_settings(
    *,
    method: str = "awq",
    format: str | None = None,
    bits: int = 4,
    group_size: int = DEFAULT_GROUP,
    sym: bool | None = None,
    desc_act: bool = False,
    samples: int | None = None,
    seq_len: int = DEFAULT_SEQ_LEN,
    seed: int = 0,
    device: str = "cpu",
    keep: Mapping[str, int] | None = None,
) -> ConvertSettings:
    """Fill in the defaults of a method and refuse what cannot be written.

    awq and rtn: awq-gemm, asymmetric. gptq: symmetric in the gptq format, which every engine reads (fast kernels often
    take nothing else, and GPTQModel refuses asymmetric v1 files that it did not write itself); asymmetric in gptq_v2.
    compressed-tensors: symmetric, as some of its versions cannot load the other kind.
    Raises ConfigError.
    """
    _one_of("--method", method, METHODS)
    if format is not None:
        _one_of("--format", format, FORMATS)
    if sym is None:
        sym = method == "gptq" if format is None else format in ("gptq", "compressed-tensors")
    if format is None:
        if method != "gptq" and not desc_act and bits == 4:
            format = "awq-gemm"
        else:
            format = "gptq" if sym else "gptq_v2"
    pairs = tuple((keep or {}).items())
    settings = ConvertSettings(
        method, format, bits, group_size, sym, desc_act, samples or 1, seq_len, seed, device, pairs
    )
    _check_grid(settings)
    _check_keep(settings)
    settings = replace(settings, samples=_sample_count(samples, device))
    if seq_len < 1:
        raise ConfigError(f"--seq-len={seq_len} is not allowed; give a whole number of at least 1")
    _check_device(device)
    return settings


def _sample_count(samples: int | None, device: str) -> int:
    if samples is None:
        return DEFAULT_SAMPLES["cpu" if device.startswith("cpu") else "cuda"]
    if samples < 1:
        raise ConfigError(f"--samples={samples} is not allowed; give a whole number of at least 1")
    return samples


def repack_settings(format: str, bits: int, group_size: int, sym: bool, desc_act: bool) -> ConvertSettings:
    """Of a repacking, which rounds nothing. Raises ConfigError for an unknown format."""
    _one_of("--format", format, FORMATS)
    return ConvertSettings("repack", format, bits, group_size, sym, desc_act, 0, 0, 0, "cpu")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; allowed are {', '.join(allowed)}")


def _check_grid(settings: ConvertSettings) -> None:
    bits, format = settings.bits, settings.format
    if bits not in FORMAT_BITS[format]:
        allowed = ", ".join(map(str, FORMAT_BITS[format]))
        other = "; use --format gptq or compressed-tensors for it" if bits in FORMAT_BITS["gptq"] else ""
        raise ConfigError(
            f"--bits={bits} is not allowed with --format {format}, whose readers know {allowed} bits{other}"
        )
    if settings.group_size != -1 and settings.group_size < 8:
        raise ConfigError(
            f"--group-size={settings.group_size} is not allowed; give -1 (one group a row), or 8 and more"
        )
    if settings.desc_act and settings.method != "gptq":
        raise ConfigError(f"--desc-act orders GPTQ's columns and means nothing to --method {settings.method}; drop it")
    if settings.desc_act and format not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"--desc-act needs a group index, which --format {format} has no place for; use --format gptq, or drop "
            "--desc-act: GPTQ then orders columns inside their groups, nearly as good"
        )


def _check_keep(settings: ConvertSettings) -> None:
    allowed = (*FORMAT_BITS[settings.format], 16)
    for pattern, bits in settings.keep:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--keep {pattern}={bits}: {pattern!r} is no regular expression ({error})") from error
        if bits not in allowed:
            raise ConfigError(
                f"--keep {pattern}={bits} is not allowed with --format {settings.format}; allowed are "
                f"{', '.join(map(str, allowed))} (16 leaves a module as it is)"
            )
        if settings.format == "awq-gemm" and bits != 16 and re.search(pattern, "lm_head"):
            raise ConfigError(f"--keep {pattern}={bits}: no reader of awq-gemm knows a quantized lm_head; use another")


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device={device!r} is not a device; give cpu, cuda or cuda:N") from error
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device={device}: torch sees no CUDA device; use --device cpu")
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device={device}: only cpu and cuda are served")

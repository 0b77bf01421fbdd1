"""From one quantized format to another: the same codes, zero points and scales, packed otherwise. Nothing is rounded.

Where the target has no place for what the source holds, the layer and the reason are said before anything is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from qengine import __version__
from qengine.checkpoint import Checkpoint
from qengine.checkpoint.writer import SHARD_BYTES
from qengine.convert.emit import Emitter, estimate_repacked
from qengine.convert.fingerprint import fingerprint
from qengine.convert.formats import Plan, pack, quantization_config, why_not_packed
from qengine.convert.report import ConvertReport, report_files
from qengine.convert.settings import ConvertSettings, repack_settings
from qengine.convert.writer import FolderWriter
from qengine.errors import CheckpointError, UnsupportedError
from qengine.quant import WeightSource
from qengine.quant.weights import QuantizedWeight

REMEDY = "make a plain copy (qengine dequantize) and convert that anew"


def repack_checkpoint(
    checkpoint: Checkpoint,
    source: WeightSource,
    out: str | os.PathLike[str],
    *,
    format: str,
    model: str,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConvertReport:
    """Write quantized `source` to the new folder `out` in `format`; dequantized weights stay the same, bit for bit.

    Raises UnsupportedError with the layer and the reason where the format cannot hold it, and ConfigError,
    CheckpointError and CapacityError as `convert_checkpoint` does.
    """
    names = source.quantized_modules()
    settings, plan = _plan(source, names, format)
    report = ConvertReport(model, Path(out), settings, plan.group_size, checkpoint.disk_bytes())
    same = fingerprint(checkpoint, model, settings, None)
    with FolderWriter(Path(out), force=force, shard_bytes=shard_bytes, resume=resume, fingerprint=same) as writer:
        writer.require_space(estimate_repacked(checkpoint))
        emitter = Emitter(writer, source, plan, settings)
        _write(source, names, plan, settings, writer, progress or (lambda done, total: None))
        quantization = quantization_config(settings, plan, __version__, {})
        emitter.side_files(checkpoint, quantization)
        report.out_bytes = writer.join()
        for name, text in report_files(report).items():
            writer.add_bytes(name, text.encode("utf-8"))
        writer.commit({**checkpoint.config, "quantization_config": quantization})
    return report


def _write(
    source: WeightSource,
    names: list[str],
    plan: Plan,
    settings: ConvertSettings,
    writer: FolderWriter,
    progress: Callable[[int, int], None],
) -> None:
    """Part 0 is every plain tensor, then a part for each block of modules with one prefix."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(name.rsplit(".", 2)[0], []).append(name)
    total = len(blocks)
    if not writer.finished:
        for name in source.plain_tensors():
            writer.add(name, source.tensor(name))
        writer.finish_part({})
    for number, members in enumerate(blocks.values(), 1):
        if number < writer.finished:
            continue
        for name in members:
            weight = _weight(source, name)
            reason = why_not_held(weight, settings, plan)
            if reason is not None:
                raise UnsupportedError(f"{name}: {reason}; {REMEDY}")
            if weight.scales.dtype == torch.float32:
                weight = replace(weight, scales=weight.scales.to(torch.float16))
            for suffix, tensor in pack(weight, settings, plan.grid(name, settings)[2]).items():
                writer.add(f"{name}.{suffix}", tensor)
        writer.finish_part({})
        source.checkpoint.tensors.close()
        progress(number, total)


def _weight(source: WeightSource, name: str) -> QuantizedWeight:
    weight = source.linear(name)
    if not isinstance(weight, QuantizedWeight):
        raise CheckpointError(f"{name}: is not quantized, though the checkpoint's config says so; get it again")
    return weight


def _plan(source: WeightSource, names: list[str], format: str) -> tuple[ConvertSettings, Plan]:
    """Grids of all modules, what most have as the settings; refuses what headers and zero points tell."""
    grids = {}
    for name in names:
        weight = _weight(source, name)
        mid = 1 << (weight.spec.bits - 1)
        group = weight.spec.group_size if 0 < weight.spec.group_size <= weight.shape[1] else -1
        grids[name] = (weight.spec.bits, group, bool((weight.zeros == mid).all()), weight.g_idx is not None)
        source.checkpoint.tensors.close()
    bits = Counter(grid[0] for grid in grids.values()).most_common(1)[0][0]
    group = Counter(grid[1] for grid in grids.values()).most_common(1)[0][0]
    sym = all(grid[2] for grid in grids.values())
    settings = repack_settings(format, bits, group, sym, any(grid[3] for grid in grids.values()))
    plan = Plan(
        {name: grid[1] for name, grid in grids.items()},
        group,
        _plain_linears(source, names),
        {name: grid[0] for name, grid in grids.items() if grid[0] != bits},
        {name: grid[2] for name, grid in grids.items() if grid[2] != sym},
    )
    for name in names:
        reason = _why_not_packed(source, name, settings, plan)
        if reason is not None:
            raise UnsupportedError(f"{name}: {reason}; {REMEDY}")
    return settings, plan


def _plain_linears(source: WeightSource, names: list[str]) -> dict[str, str]:
    """Linears of decoder layers that the source leaves unquantized: the config has to say so."""
    kinds = {name.rsplit(".", 1)[-1] for name in names}
    found = (name.removesuffix(".weight") for name in source.plain_tensors() if name.endswith(".weight"))
    return {name: "unquantized in the source" for name in found if name.rsplit(".", 1)[-1] in kinds - {"lm_head"}}


def _why_not_packed(source: WeightSource, name: str, settings: ConvertSettings, plan: Plan) -> str | None:
    bits, group, _ = plan.grid(name, settings)
    if settings.format == "awq-gemm":
        if bits != 4:
            return f"awq-gemm holds 4 bits, this layer has {bits}"
        if group != plan.group_size:
            return f"awq-gemm has one group size for all layers ({plan.group_size}), this one has {group}"
        if name == plan.head():
            return "awq-gemm readers know no quantized output head"
    return why_not_packed(settings.format, bits, source.linear_shape(name))


def why_not_held(weight: QuantizedWeight, settings: ConvertSettings, plan: Plan) -> str | None:
    """Why `settings.format` cannot hold this weight without change, or None."""
    columns, groups = weight.shape[1], weight.scales.shape[1]
    if settings.format not in ("gptq", "gptq_v2"):
        size = columns if groups == 1 else weight.group_size
        plain = torch.arange(columns) // size
        if not torch.equal(weight.group_index().cpu(), plain):
            return f"its groups are not in the order of the columns (act-order), and {settings.format} has no index"
        if columns % groups:
            return f"its last group is shorter than the others, which {settings.format} does not know"
    if settings.format == "gptq" and bool((weight.zeros < 1).any()):
        return "it has zero points of 0, which GPTQ v1 stores as -1 and readers read differently; use gptq_v2"
    if weight.scales.dtype == torch.float32 and not torch.equal(weight.scales.half().float(), weight.scales):
        return "its float32 scales are no float16 numbers"
    return None

"""Decides, from the shapes alone, which modules are quantized and with which group size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from qengine.convert.formats import Plan, one_group_only, why_not_packed
from qengine.convert.scheme import STANDARD_GROUPS, fit_group
from qengine.convert.settings import ConvertSettings
from qengine.errors import UnsupportedError


def make_plan(shapes: dict[str, tuple[int, int]], settings: ConvertSettings) -> tuple[Plan, list[str]]:
    """(plan, notes) for modules of the given (N, K).

    One group size for the whole model is preferred, because every reader takes it: the largest usual one, at most the
    size asked for, that divides every width. Where there is none, formats that can carry it get one a module, and AWQ
    leaves the modules that do not fit unquantized. Modules that `keep` names get their bits.
    Raises UnsupportedError if nothing can be quantized.
    """
    notes: list[str] = []
    plain: dict[str, str] = {}
    kept = {name: bits for name in shapes if (bits := settings.kept_bits(name)) is not None}
    for name, shape in shapes.items():
        if kept.get(name) == 16:
            plain[name] = "kept as it is"
            continue
        reason = why_not_packed(settings.format, kept.get(name, settings.bits), shape)
        if reason is None and fit_group([shape[1]], settings.group_size) is None:
            reason = f"no group of 16 to {settings.group_size} columns divides in_features={shape[1]}"
        if reason is not None:
            plain[name] = reason
            notes.append(f"{name}: left unquantized, {reason}")
    fitting = {name: shape[1] for name, shape in shapes.items() if name not in plain}
    if not fitting:
        first, reason = next(iter(plain.items()), ("model", "it has no linear layers"))
        raise UnsupportedError(f"no layer can be quantized ({first}: {reason}); try --format compressed-tensors")
    common = fit_group(sorted(set(fitting.values())), settings.group_size)
    if common is not None and (common == settings.group_size or common in STANDARD_GROUPS):
        if common != settings.group_size:
            widths = ", ".join(str(k) for k in sorted(set(fitting.values())) if k % settings.group_size)
            notes.append(
                f"group size {common} instead of {settings.group_size} for the whole model: "
                f"{settings.group_size} does not divide in_features {widths}"
            )
        return _with_bits(Plan(dict.fromkeys(fitting, common), common, plain), kept, settings), notes
    shape_plan = _uniform if one_group_only(settings.format) else _each_its_own
    plan, notes = shape_plan(fitting, plain, notes, settings)
    return _with_bits(plan, kept, settings), notes


def _with_bits(plan: Plan, kept: dict[str, int], settings: ConvertSettings) -> Plan:
    return replace(plan, bits={name: b for name, b in kept.items() if name in plan.groups and b != settings.bits})


def _each_its_own(
    widths: dict[str, int], plain: dict[str, str], notes: list[str], settings: ConvertSettings
) -> tuple[Plan, list[str]]:
    groups = {}
    for name, width in widths.items():
        group = fit_group([width], settings.group_size)
        assert group is not None, "modules without a fitting group were left out before"
        groups[name] = group
        if group != settings.group_size:
            notes.append(f"{name}: group size {group}, because {settings.group_size} does not divide {width}")
    usual = Counter(groups.values()).most_common(1)[0][0]
    return Plan(groups, usual, plain), notes


def _uniform(
    widths: dict[str, int], plain: dict[str, str], notes: list[str], settings: ConvertSettings
) -> tuple[Plan, list[str]]:
    own = {fit_group([width], settings.group_size) for width in widths.values()}
    common = fit_group(sorted(set(widths.values())), settings.group_size)
    sizes = {g for g in (*own, common, *STANDARD_GROUPS) if g is not None and g <= settings.group_size}
    covered = {g: sum(width % g == 0 for width in widths.values()) for g in sizes}
    group = max(covered, key=lambda g: (covered[g], g in STANDARD_GROUPS, g))
    plain = dict(plain)
    for name, width in widths.items():
        if width % group:
            plain[name] = f"the model's group size {group} does not divide in_features={width}"
            notes.append(f"{name}: left unquantized, {plain[name]} (--format gptq can give it a group of its own)")
    if group != settings.group_size:
        notes.append(f"group size {group} instead of {settings.group_size} for the whole model")
    return Plan(dict.fromkeys((n for n in widths if n not in plain), group), group, plain), notes

"""`qengine doctor`: what this machine has, which path each layer would take, and what is wrong."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qengine.cli.version import versions


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (level "error") or worth knowing (level "warning"), and what to do about it."""

    level: str
    text: str


def doctor(
    model: Annotated[str | None, typer.Argument(help="A checkpoint: which path would each of its layers take?")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what card, driver and libraries are here, which path each layer would take, and what is wrong.

    Exit code 1 if anything found is an error.

    Examples:

        qengine doctor

        qengine doctor ./Qwen2.5-7B-Instruct-AWQ --json
    """
    findings: list[Finding] = []
    machine = describe_machine()
    cards = describe_cards(findings)
    found = versions()
    check_versions(found, findings)
    check_compiler(cards, findings)
    paths = layer_paths(model, device, cards, findings) if model else []
    report: dict[str, Any] = {"machine": machine, "cards": cards, "versions": found, "layers": paths}
    report["findings"] = [asdict(f) for f in findings]
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if any(f.level == "error" for f in findings):
        raise typer.Exit(1)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, vector instructions and memory in GiB."""
    cpu, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        cpu, flags = fields.get("model name", cpu), set(fields.get("flags", "").split())
    memory = Path("/proc/meminfo")
    sizes = dict(line.split(":", 1) for line in memory.read_text().splitlines()) if memory.is_file() else {}
    gib = {key: int(value.split()[0]) / 2**20 for key, value in sizes.items() if value.strip().endswith("kB")}
    import torch

    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "vector": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_int8") if name in flags],
        "memory_gib": round(gib.get("MemTotal", 0.0), 1),
        "available_gib": round(gib.get("MemAvailable", 0.0), 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_cards(findings: list[Finding]) -> list[dict[str, Any]]:
    """Every CUDA device that torch sees; a card that the driver has and torch does not is an error."""
    import torch

    listed = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    if not torch.cuda.is_available():
        if listed and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            text = f"CUDA_VISIBLE_DEVICES hides {listed[0]}: everything runs on the CPU reference path"
            findings.append(Finding("warning", text))
        elif listed:
            build = torch.version.cuda
            why = f"built for CUDA {build}, newer than the driver allows?" if build else "a CPU-only build"
            text = f"the driver lists {listed[0]}, but torch {torch.__version__} ({why}) sees no card"
            findings.append(Finding("error", f"{text}: pip install a torch build for your driver"))
        else:
            findings.append(Finding("warning", "no NVIDIA card: everything runs on the CPU reference path"))
        return []
    driver = listed[0].rsplit(",", 1)[1].strip() if listed else "unknown"
    cards = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        cards.append(
            {
                "name": properties.name,
                "sm": capability[0] * 10 + capability[1],
                "driver": driver,
                "cuda": torch.version.cuda,
                "memory_gib": round(total / 2**30, 1),
                "free_gib": round(free / 2**30, 1),
                "bfloat16": capability >= (8, 0),
            }
        )
        if capability < (7, 5):
            findings.append(
                Finding("error", f"{properties.name} is sm_{cards[-1]['sm']}; sm_75 (Turing) or newer is needed")
            )
        if free < total * 0.8:
            text = f"{properties.name}: {(total - free) / 2**30:.1f} GiB are in use by other processes"
            findings.append(Finding("warning", f"{text}: nvidia-smi lists them"))
    return cards


def nvidia_smi(*arguments: str) -> list[str]:
    """Lines that nvidia-smi prints, or none where it is not installed or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def check_versions(found: dict[str, str | None], findings: list[Finding]) -> None:
    """Compare what is installed with what this package asks for in its own metadata."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        needs = metadata.requires("qengine") or []
    except metadata.PackageNotFoundError:
        text = "qengine runs from a checkout that is not installed, so versions are not checked: pip install -e ."
        findings.append(Finding("warning", text))
        return
    for text in needs:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            findings.append(
                Finding("error", f"{need.name} is not installed: pip install '{need.name}{need.specifier}'")
            )
            continue
        if not need.specifier.contains(have, prereleases=True):
            text = f"{need.name} {have} is installed, {need.specifier} is needed"
            findings.append(Finding("error", f"{text}: pip install -U '{need.name}{need.specifier}'"))


def check_compiler(cards: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Triton builds a small C launcher for each kernel, so a card without a C compiler is of no use."""
    if cards and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        findings.append(Finding("error", "no C compiler (cc, gcc or clang) on PATH: Triton needs one; apt install gcc"))


def layer_paths(model: str, device: str, cards: list[dict[str, Any]], findings: list[Finding]) -> list[dict[str, Any]]:
    """For each kind of linear layer of a checkpoint: how many, and the implementation that would run it."""
    from qengine.checkpoint import open_checkpoint
    from qengine.errors import QEngineError
    from qengine.models import linear_paths

    try:
        where = ("cuda" if cards else "cpu") if device == "auto" else device
        return linear_paths(open_checkpoint(model), device=where)
    except QEngineError as error:
        findings.append(Finding("error", str(error)))
        return []


def show(report: dict[str, Any]) -> None:
    """The report for a person."""
    console = Console()
    machine = report["machine"]
    console.print(f"[bold]Machine[/]   {machine['cpu']}, {machine['threads']} threads, {' '.join(machine['vector'])}")
    console.print(
        f"          {machine['available_gib']} of {machine['memory_gib']} GiB memory available; {machine['system']}"
    )
    for card in report["cards"]:
        bf16 = "bfloat16" if card["bfloat16"] else "no bfloat16: float16 is used"
        memory = f"{card['free_gib']} of {card['memory_gib']} GiB free"
        console.print(f"[bold]Card[/]      {card['name']} (sm_{card['sm']}), {memory}, {bf16}")
        console.print(f"          driver {card['driver']}, CUDA {card['cuda']}")
    listed = ", ".join(f"{name} {value or 'missing'}" for name, value in report["versions"].items())
    console.print(f"[bold]Versions[/]  {listed}", highlight=False)
    if report["layers"]:
        table = Table("layers", "shape", "weights", "path")
        for row in report["layers"]:
            table.add_row(
                f"{row['count']} x {row['name']}", f"{row['shape'][0]} x {row['shape'][1]}", row["weights"], row["path"]
            )
        console.print(table)
    for finding in report["findings"]:
        colour = "red" if finding["level"] == "error" else "yellow"
        console.print(f"[{colour}]{finding['level']}:[/] {finding['text']}", highlight=False)
    if not report["findings"]:
        console.print("[green]nothing is wrong[/]")

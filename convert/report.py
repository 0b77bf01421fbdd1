"""What a conversion did, as plain data and as a short text."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qengine import __version__
from qengine.convert.evaluate import Evaluation
from qengine.convert.html import report_page
from qengine.convert.layer_result import LinearRecord
from qengine.convert.settings import ConvertSettings


@dataclass
class ConvertReport:
    """The result of `convert_checkpoint`.

    out: the folder. group_size: the one used (settings.group_size was asked for). source_bytes, out_bytes: weight
    files. seconds: wall time; not part of report.json, so that equal seeds give equal folders. layer_errors: squared
    distance of the hidden states after each layer from the source model's, relative to these, over the calibration
    windows; None where there was nothing to compare.
    dropped_samples: calibration windows left out because activations overflowed. evaluation: if asked for.
    """

    source: str
    out: Path
    settings: ConvertSettings
    group_size: int
    source_bytes: int = 0
    out_bytes: int = 0
    seconds: float = 0.0
    calibration_tokens: int = 0
    dropped_samples: int = 0
    layers: list[LinearRecord] = field(default_factory=list)
    layer_errors: list[float | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    evaluation: Evaluation | None = None

    def snapshot(self) -> dict[str, Any]:
        """What layers have added so far, as plain data, for `restore`."""
        return {
            "calibration_tokens": self.calibration_tokens,
            "dropped_samples": self.dropped_samples,
            "layers": [record.as_dict() for record in self.layers],
            "layer_errors": self.layer_errors,
            "warnings": self.warnings,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up what `snapshot` gave in an earlier process."""
        self.calibration_tokens, self.dropped_samples = saved["calibration_tokens"], saved["dropped_samples"]
        self.layers = [LinearRecord(**record) for record in saved["layers"]]
        self.layer_errors, self.warnings = list(saved["layer_errors"]), list(saved["warnings"])

    def errors_by_kind(self) -> dict[str, dict[str, float]]:
        """Kind of linear ("q_proj") -> mean error, mean error of plain rounding, mean weight error."""
        by_kind: dict[str, list[LinearRecord]] = {}
        for record in self.layers:
            by_kind.setdefault(record.name.rsplit(".", 1)[-1], []).append(record)
        return {kind: _means(records) for kind, records in by_kind.items()}

    def command(self) -> str:
        """The command line that does the same, but for the place of its output."""
        settings = self.settings
        words = ["qengine", "convert", self.source, "--out", "DIR"]
        if settings.method == "repack":
            return shlex.join([*words, "--format", settings.format])
        words += ["--method", settings.method, "--format", settings.format, "--bits", str(settings.bits)]
        words += ["--group-size", str(settings.group_size), "--sym" if settings.sym else "--asym"]
        words += ["--desc-act"] if settings.desc_act else []
        for pattern, bits in settings.keep:
            words += ["--keep", f"{pattern}={bits}"]
        if settings.method != "rtn":
            words += ["--samples", str(settings.samples), "--seq-len", str(settings.seq_len)]
            words += ["--seed", str(settings.seed)]
        return shlex.join([*words, "--device", settings.device])

    def as_dict(self, *, timing: bool = True) -> dict[str, Any]:
        """Plain data for JSON."""
        settings = asdict(self.settings)
        requested = settings.pop("group_size")
        value: dict[str, Any] = {
            "source": self.source,
            "command": self.command(),
            "versions": {"qengine": __version__, "torch": torch.__version__},
            "settings": {**settings, "group_size": self.group_size, "requested_group_size": requested},
            "source_bytes": self.source_bytes,
            "out_bytes": self.out_bytes,
            "calibration_tokens": self.calibration_tokens,
            "dropped_samples": self.dropped_samples,
            "errors_by_kind": self.errors_by_kind(),
            "layer_errors": self.layer_errors,
            "warnings": self.warnings,
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "linears": [record.as_dict() for record in self.layers],
        }
        if timing:
            value.update(out=str(self.out), seconds=round(self.seconds, 2))
        return value


def report_files(report: ConvertReport) -> dict[str, str]:
    """The report as files: name -> text."""
    value = report.as_dict(timing=False)
    return {
        "report.json": json.dumps({"qengine": __version__, **value}, indent=2, ensure_ascii=False) + "\n",
        "report.html": report_page(value),
    }


def _means(records: list[LinearRecord]) -> dict[str, float]:
    columns = {
        "error": [r.error for r in records],
        "rtn_error": [r.rtn_error for r in records],
        "weight_error": [r.weight_error for r in records],
    }
    found = {key: [v for v in values if v is not None] for key, values in columns.items()}
    return {key: sum(values) / len(values) for key, values in found.items() if values}

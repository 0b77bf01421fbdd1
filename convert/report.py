"""What a conversion did, as plain data and as a short text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qengine.convert.layer_result import LinearRecord
from qengine.convert.settings import ConvertSettings


@dataclass
class ConvertReport:
    """The result of `convert_checkpoint`.

    out: the folder. group_size: the one used (settings.group_size was asked for). source_bytes, out_bytes: weight
    files. seconds: wall time; not part of report.json, so that equal seeds give equal folders. layer_errors: relative
    squared error of each layer's output on the first calibration batch, None where there was nothing to compare.
    dropped_samples: calibration windows left out because activations overflowed.
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

    def errors_by_kind(self) -> dict[str, dict[str, float]]:
        """Kind of linear ("q_proj") -> mean error, mean error of plain rounding, mean weight error."""
        by_kind: dict[str, list[LinearRecord]] = {}
        for record in self.layers:
            by_kind.setdefault(record.name.rsplit(".", 1)[-1], []).append(record)
        return {kind: _means(records) for kind, records in by_kind.items()}

    def as_dict(self, *, timing: bool = True) -> dict[str, Any]:
        """Plain data for JSON."""
        settings = asdict(self.settings)
        requested = settings.pop("group_size")
        value: dict[str, Any] = {
            "source": self.source,
            "settings": {**settings, "group_size": self.group_size, "requested_group_size": requested},
            "source_bytes": self.source_bytes,
            "out_bytes": self.out_bytes,
            "calibration_tokens": self.calibration_tokens,
            "dropped_samples": self.dropped_samples,
            "errors_by_kind": self.errors_by_kind(),
            "layer_errors": self.layer_errors,
            "warnings": self.warnings,
            "linears": [record.as_dict() for record in self.layers],
        }
        if timing:
            value.update(out=str(self.out), seconds=round(self.seconds, 2))
        return value


def _means(records: list[LinearRecord]) -> dict[str, float]:
    columns = {
        "error": [r.error for r in records],
        "rtn_error": [r.rtn_error for r in records],
        "weight_error": [r.weight_error for r in records],
    }
    found = {key: [v for v in values if v is not None] for key, values in columns.items()}
    return {key: sum(values) / len(values) for key, values in found.items() if values}

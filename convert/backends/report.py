"""What a conversion by a peer did."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qengine import __version__
from qengine.convert.evaluate import Evaluation
from qengine.convert.settings import ConvertSettings


@dataclass
class PeerReport:
    """The result of `convert_with_backend`.

    out: the folder. group_size: the one used (settings.group_size was asked for). versions: of the peer and of what it
    computes with. source_bytes, out_bytes: weight files. seconds: of the whole; quantizer_seconds: of the peer's
    quantizer alone; neither is in report.json. linears: quantized modules that loaded. before, after: perplexity of the
    source and of the result on the first calibration windows. evaluation: if asked for.
    """

    backend: str
    source: str
    out: Path
    settings: ConvertSettings
    group_size: int
    versions: dict[str, str] = field(default_factory=dict)
    source_bytes: int = 0
    out_bytes: int = 0
    seconds: float = 0.0
    quantizer_seconds: float = 0.0
    calibration_tokens: int = 0
    linears: int = 0
    before: float = 0.0
    after: float = 0.0
    warnings: list[str] = field(default_factory=list)
    evaluation: Evaluation | None = None

    def command(self) -> str:
        """The command line that does the same, but for the place of its output and the calibration text."""
        settings = self.settings
        words = ["qengine", "convert", self.source, "--out", "DIR", "--backend", self.backend]
        words += ["--method", settings.method, "--format", settings.format, "--bits", str(settings.bits)]
        words += ["--group-size", str(settings.group_size), "--sym" if settings.sym else "--asym"]
        words += ["--desc-act"] if settings.desc_act else []
        words += ["--samples", str(settings.samples), "--seq-len", str(settings.seq_len), "--seed", str(settings.seed)]
        return shlex.join([*words, "--device", settings.device])

    def as_dict(self, *, timing: bool = True) -> dict[str, Any]:
        """Plain data for JSON."""
        settings = asdict(self.settings)
        requested = settings.pop("group_size")
        value: dict[str, Any] = {
            "backend": self.backend,
            "source": self.source,
            "command": self.command(),
            "versions": {"qengine": __version__, **self.versions},
            "settings": {**settings, "group_size": self.group_size, "requested_group_size": requested},
            "source_bytes": self.source_bytes,
            "out_bytes": self.out_bytes,
            "calibration_tokens": self.calibration_tokens,
            "linears": self.linears,
            "calibration_perplexity": {"before": self.before, "after": self.after},
            "warnings": self.warnings,
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
        }
        if timing:
            value.update(
                out=str(self.out), seconds=round(self.seconds, 2), quantizer_seconds=round(self.quantizer_seconds, 2)
            )
        return value

    def text(self) -> str:
        """report.json."""
        return json.dumps(self.as_dict(timing=False), indent=2, ensure_ascii=False) + "\n"

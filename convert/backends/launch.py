"""Starts a peer's process and says what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qengine.convert.backends.job import PeerJob
from qengine.errors import CapacityError, UnsupportedError

# The child imports what this process would, whatever the folder it starts in.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qengine.convert.backends.worker import main; main(sys.argv[2], sys.argv[3])"
)
_KILLED = -9


def run_peer(job: PeerJob, device: str) -> dict[str, Any]:
    """{"seconds", "versions"} of a job done; the peer's own output goes to stderr.

    device: cpu, cuda or cuda:N, the only one that the process sees. Raises UnsupportedError with the peer's message
    where it fails, CapacityError where the system killed it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job.save(asked)
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        command = [sys.executable, "-c", _START, paths, str(asked), str(answered)]
        # What peers leave in the current and the temporary folder goes with the scratch.
        env = {**environment(device), "TMPDIR": scratch}
        code = subprocess.run(command, env=env, cwd=scratch, stdin=subprocess.DEVNULL, check=False).returncode
        if not answered.is_file():
            raise _died(job.backend, code)
        result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    if "error" not in result:
        return result
    if result["ours"]:
        raise UnsupportedError(result["error"])
    raise UnsupportedError(
        f"--backend {job.backend}: its quantizer failed ({result['error']}); nothing is written. Its own output is "
        "above; other settings, or our own converter (without --backend), may do"
    )


def _died(backend: str, code: int) -> Exception:
    if code == _KILLED:
        return CapacityError(
            f"--backend {backend}: its process was killed, mostly for want of memory; nothing is written. Lower "
            "--samples or --seq-len, or convert without --backend: one layer is in memory at a time then"
        )
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return UnsupportedError(
        f"--backend {backend}: its process ended with {how} and no result; nothing is written. Its own output is above"
    )


def environment(device: str) -> dict[str, str]:
    """Ours, and what the peers need: one device, no hub, no compilation of each dequantization, workers enough."""
    value = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    value.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, os.cpu_count() or 2)))
    if device == "cpu":
        value["CUDA_VISIBLE_DEVICES"] = ""
    else:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        number = int(device.partition(":")[2] or 0)
        value["CUDA_VISIBLE_DEVICES"] = visible[number] if number < len(visible) else str(number)
    return value

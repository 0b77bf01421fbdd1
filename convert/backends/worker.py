"""The process in which a peer quantizes: it may print, patch itself, run out of memory or die without harm to ours."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from qengine.convert.backends.job import PeerJob
from qengine.errors import QEngineError

DISTRIBUTIONS = {
    "autoawq": ("autoawq",),
    "gptqmodel": ("gptqmodel",),
    "optimum": ("optimum", "gptqmodel"),
}


def main(job_file: str, result_file: str) -> None:
    """Run the job in one file, write what came of it to the other: seconds and versions, or the error."""
    os.dup2(2, 1)  # ours prints JSON to stdout; what the peer prints is for the eye
    job = PeerJob.load(Path(job_file))
    try:
        result = run(job)
    except QEngineError as error:
        result = {"error": str(error), "ours": True}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}", "ours": False}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    sys.stderr.flush()


def run(job: PeerJob) -> dict[str, Any]:
    """Seed, quantize, and name the versions."""
    import numpy
    import torch

    random.seed(job.seed)
    numpy.random.seed(job.seed)
    torch.manual_seed(job.seed)
    backend = importlib.import_module(f"qengine.convert.backends.{job.backend}")
    seconds = backend.quantize(job)
    return {"seconds": round(seconds, 2), "versions": versions(job.backend)}


def versions(backend: str) -> dict[str, str]:
    """Of the peer and of what it computes with."""
    names = (*DISTRIBUTIONS[backend], "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in names}

"""From a process's start to its first token: run in processes of their own, with an empty and with a warm Triton cache.

The child is `python -m qengine.bench.startup JSON`, JSON being {"model": ..., "settings": {...}, "started": epoch}.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qengine.errors import QEngineError

PROMPT_TOKENS = 128


def measure_startups(model: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two starts that share a Triton cache of their own: the first finds it empty, the second what the first compiled.

    See measure_startup.
    """
    with tempfile.TemporaryDirectory(prefix="qengine-triton-") as folder:
        return [measure_startup(model, settings, Path(folder)) | {"triton_cache": state} for state in ("empty", "warm")]


def measure_startup(model: str, settings: dict[str, Any], cache: Path, timeout: float = 600) -> dict[str, Any]:
    """Seconds until qengine is imported, the model is loaded and the first token is there, counted from the exec.

    cache: the folder of Triton's cache. Raises QEngineError with the child's last words.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    task = json.dumps({"model": model, "settings": settings, "started": time.time()})
    command = [sys.executable, "-m", "qengine.bench.startup", task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise QEngineError(f"start-up: no token within {timeout:g} s; try --loads without startup") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        words = " ".join(done.stderr.strip().splitlines()[-3:])
        raise QEngineError(f"start-up: the process ended with {done.returncode}: {words}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def disk_cache_note(model: str) -> str:
    """What the page cache holds: the files were read before, so the disk is warm."""
    size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    return f"{size / 2**30:.2f} GiB of weights, read before (page cache warm)"


def child(task: dict[str, Any]) -> dict[str, float]:
    """In the new process: load, generate one token, say when what was done.

    kernels_compiled: by this process itself until then, not by the workers that compile ahead.
    """
    from qengine.llm import LLM
    from qengine.sampling_params import SamplingParams

    imported = time.time()
    compiled = compiled_kernels()
    llm = LLM(task["model"], **task["settings"])
    loaded = time.time()
    prompt = [(7 * index) % llm.engine.limits.sample_vocab for index in range(PROMPT_TOKENS)]
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    done = time.time()
    begin = task["started"]
    times = {"import_s": imported - begin, "load_s": loaded - begin, "first_token_s": done - begin}
    return times | {"kernels_compiled": len(compiled)}


def compiled_kernels() -> list[str]:
    """Fills up with the names of kernels that this process compiles from now on."""
    names: list[str] = []
    with contextlib.suppress(ImportError):  # without Triton there are none
        from triton import knobs

        def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                names.append(src.name)

        knobs.compilation.listener = note
    return names


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))

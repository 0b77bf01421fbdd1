"""Make a virtual environment that holds qengine as an editable install: `make_venv.py FOLDER [EXTRA ...]`.

Runs on a bare Python 3.10 to 3.13, standard library only. Where no NVIDIA card answers, torch is installed as its CPU
build (about 200 MB) before anything else asks for torch, since PyPI's default Linux build brings gigabytes of CUDA.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def pip(python: Path, *arguments: str, check: bool = True) -> int:
    """Run pip of the new environment, quietly except for errors."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    print("+", " ".join(arguments), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code and check:
        sys.exit(f"make_venv: pip install {' '.join(arguments)} failed (exit {code}); is the package index reachable?")
    return code


def install_torch(python: Path) -> None:
    """Install torch: for the card if there is one, else the CPU build, else (said aloud) whatever the index has."""
    if has_gpu():
        pip(python, "torch>=2.9")
        return
    # No retries: a machine that reaches a mirror but not this index should find out quickly.
    quick = ("--retries", "0", "--timeout", "15")
    if pip(python, *quick, "--extra-index-url", CPU_INDEX, CPU_TORCH, check=False):
        print(f"make_venv: no CPU build of torch to be had ({CPU_TORCH}); installing the default build", flush=True)
        pip(python, "torch>=2.9")


def main() -> None:
    """Make the environment; a folder left by a failed run is made anew."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        sys.exit(
            f"make_venv: Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12"
        )
    folder, extras = Path(sys.argv[1]).resolve(), ",".join(sys.argv[2:])
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    install_torch(python)
    pip(python, "--editable", f"{ROOT}[{extras}]" if extras else str(ROOT))


if __name__ == "__main__":
    main()

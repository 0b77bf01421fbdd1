"""Exit 0 if this interpreter has all that pyproject.toml's dependencies ask for, else say what is missing and exit 1.

Standard library and `packaging` (which transformers brings) only; an interpreter without it lacks more than that.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def dependencies(pyproject: Path) -> list[str]:
    """The strings of `dependencies = [...]`; Python 3.10 has no TOML reader."""
    lines = pyproject.read_text(encoding="utf-8").splitlines()
    start = lines.index("dependencies = [") + 1
    end = lines.index("]", start)
    return [line.strip().rstrip(",").strip('"') for line in lines[start:end]]


def missing(needs: list[str]) -> list[str]:
    """What is absent or of the wrong version, one line each."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging is not installed"]
    found = []
    for text in needs:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate():
            continue
        try:
            have = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            found.append(f"{need.name}{need.specifier} is not installed")
            continue
        if not need.specifier.contains(have, prereleases=True):
            found.append(f"{need.name} {have} is installed, {need.specifier} is needed")
    return found


if __name__ == "__main__":
    problems = missing(dependencies(Path(sys.argv[1])))
    print(*problems, sep="\n", file=sys.stderr)
    sys.exit(bool(problems))

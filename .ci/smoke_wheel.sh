#!/usr/bin/env bash
# Builds the wheel and the sdist, installs the wheel in a fresh environment and imports every part from it, away from
# the checkout. The heavy dependencies are borrowed from the first environment by path, so that only qengine is new.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-.venv}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$base/bin/python" -m build --outdir "$scratch/dist" . >"$scratch/build.log" 2>&1 || { tail -n 40 "$scratch/build.log"; exit 1; }
"$base/bin/python" -m venv --clear .venv-smoke
site=$(.venv-smoke/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
.venv-smoke/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$scratch"/dist/*.whl
cd "$scratch"
"$OLDPWD/.venv-smoke/bin/python" - <<'PY'
import importlib, pathlib, pkgutil, sys
import qengine
home = pathlib.Path(qengine.__file__).parent
assert ".venv-smoke" in str(home), f"imported from {home}, not from the wheel"
names = sorted(m.name for m in pkgutil.walk_packages([str(home)], "qengine.") if not m.name.endswith(".main"))
folders = {n.split(".")[1] for n in names}
for part in ("kernels", "convert"):  # namespace packages: pkgutil does not walk into them
    files = sorted((home / part).rglob("*.py"))
    assert files, f"the wheel has no {part}: are the links qengine/{part} committed?"
    names += [".".join(("qengine", *f.relative_to(home).with_suffix("").parts)) for f in files if f.name != "__init__.py"]
for name in names:
    importlib.import_module(name)
assert (home / "convert" / "data" / "calibration.txt").is_file(), "the calibration text is missing from the wheel"
assert (home / "server" / "page" / "vendor" / "purify.min.js").is_file(), "the page is missing from the wheel"
print(f"wheel: {len(names)} modules import, parts: {', '.join(sorted(folders | {'kernels', 'convert'}))}; Python {sys.version.split()[0]}")
PY
"$OLDPWD/.venv-smoke/bin/qengine" version
"$OLDPWD/.venv-smoke/bin/qengine" --help >/dev/null

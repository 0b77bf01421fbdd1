#!/usr/bin/env bash
# One command for the owner of a T4 (or any CUDA card): is everything right on it, how fast is it, and how near are the
# predictions? Works on Colab, Kaggle, a cloud machine and at home; writes report.md, report.png and report.json.
#
#   bash benchmarks/t4/run.sh                          about 15 minutes on a T4, plus the installation
#   bash benchmarks/t4/run.sh --quick                  a few minutes
#   bash benchmarks/t4/run.sh --model ./my-awq-model   with a model of your own instead of random weights
#   bash benchmarks/t4/run.sh --device cpu --quick     a dry run without a card
#   bash benchmarks/t4/run.sh --help                   everything else
#
# PYTHON names the interpreter (3.10 to 3.13). If it cannot import what is needed, an environment is made in .venv-t4.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
venv=$root/.venv-t4

usable() { # usable PYTHON: it has all that qengine needs, in versions that pyproject.toml allows
  PYTHONPATH="$root" "$1" "$root/benchmarks/t4/needs.py" "$root/pyproject.toml" 2>/dev/null
}

command -v "$python" >/dev/null || { echo "run.sh: no $python here; set PYTHON to Python 3.10 to 3.13" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  { echo "run.sh: $("$python" --version) does not do; set PYTHON to Python 3.10 to 3.13" >&2; exit 2; }

wants_cpu=0
for ((i = 1; i <= $#; i++)); do
  next=$((i + 1))
  [[ ${!i} == --device=cpu || (${!i} == --device && ${!next:-} == cpu) ]] && wants_cpu=1
  [[ ${!i} == --help || ${!i} == -h ]] && exec "$python" "$root/benchmarks/t4/run.py" --help
done
if [[ $wants_cpu == 0 ]] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "run.sh: no NVIDIA card answers (nvidia-smi -L)." >&2
  echo "  Colab: Runtime > Change runtime type > T4 GPU.  Kaggle: Settings > Accelerator > GPU T4." >&2
  echo "  For a dry run without a card: bash benchmarks/t4/run.sh --device cpu --quick" >&2
  exit 2
fi

if ! usable "$python"; then
  if ! usable "$venv/bin/python"; then
    echo "run.sh: making an environment in $venv (a few minutes, once)"
    # What the machine has already, such as Colab's torch, is used where its version will do.
    if "$python" -m venv --system-site-packages "$venv" 2>/dev/null; then
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[test]" matplotlib
    else
      echo "run.sh: $python has no venv; installing into its own environment"
      "$python" -m pip install --quiet --disable-pip-version-check --editable "$root[test]" matplotlib
      venv=
    fi
  fi
  [[ -n $venv ]] && python=$venv/bin/python
fi
usable "$python" || { PYTHONPATH="$root" "$python" "$root/benchmarks/t4/needs.py" "$root/pyproject.toml"; exit 2; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" "$root/benchmarks/t4/run.py" "$@"

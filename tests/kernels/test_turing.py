"""The compiler hook for sm_75: what it compiles, what it refuses, what it leaves alone, and the cache key.

With every Triton that is supported, each from PyPI in a throw-away folder (some 200 MB each, minutes):

    python -m pytest -m slow tests/kernels/test_turing.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qengine.kernels import turing

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_for_turing.py"


def compile_all(cache: Path, *, hook: bool = True, path: str = "") -> dict:
    """Results of compile_for_turing.py in a process and a Triton cache of its own."""
    env = dict(os.environ, TRITON_CACHE_DIR=str(cache), PYTHONPATH=os.pathsep.join(p for p in (path, str(ROOT)) if p))
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "hook" if hook else "stock"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_hooked(result: dict) -> None:
    assert result["75 float16"] == {"m16n8k8": True, "m16n8k16": False, "cp.async": False, "hmma": True}
    assert result["80 float16"]["m16n8k16"] is True, "other capabilities keep their own instructions"
    assert result["75 no dot, 3 stages"]["hmma"] is False
    assert result["75 float32 ieee"]["hmma"] is False
    for name, reason in {
        "75 float16, 3 stages": "num_stages=3, but sm_75 has no asynchronous copies",
        "75 a loop of 2 stages": "num_stages=2, but sm_75 has no asynchronous copies",
        "75 bfloat16": "bf16",
        "75 int8": "i8",
        "75 float8": "f8E5M2",
        "75 float32": "TF32",
        "75 sums in float16": "sums in f16",
    }.items():
        assert "TuringError" in result[name], name
        assert reason in result[name], name
    assert result["installed twice"] is True


def check_budgets(cache: Path, path: str) -> None:
    """The sampler's kernels, which need the most registers, keep within their budgets with the Triton in `path`."""
    paths = [path, str(ROOT), str(ROOT / "tests" / "support")]
    env = dict(os.environ, TRITON_CACHE_DIR=str(cache), PYTHONPATH=os.pathsep.join(paths))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_sampling_aot.py"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_installed_triton_compiles_and_refuses(tmp_path: Path) -> None:
    check_hooked(compile_all(tmp_path))


def test_a_kernel_cached_without_the_hook_is_not_served(tmp_path: Path) -> None:
    before = compile_all(tmp_path, hook=False)
    assert before["75 float16"]["hmma"] is False
    after = compile_all(tmp_path)
    assert after["75 float16"]["hmma"] is True


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_every_supported_triton_compiles_and_refuses(version: str, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    subprocess.run([*command, f"triton=={version}"], check=True, timeout=900)
    stock = compile_all(tmp_path / "cache", hook=False, path=str(target))
    assert stock["triton"] == version
    assert stock["75 float16"]["hmma"] is False
    hooked = compile_all(tmp_path / "cache", path=str(target))
    assert hooked["triton"] == version
    check_hooked(hooked)
    check_budgets(tmp_path / "cache", str(target))


def test_split_mma_halves_an_instruction() -> None:
    whole = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{ %f1, %f2, %f3, %f4 }, { %r1, %r2, %r3, %r4 }, { %r5, %r6 }, { %f5, %f6, %f7, %f8 };"
    )
    first, second = (line.strip() for line in turing.split_mma(whole).split("\n"))
    assert first.endswith("{ %f1, %f2, %f3, %f4 }, { %r1, %r2 }, { %r5 }, { %f5, %f6, %f7, %f8 };")
    assert second.endswith("{ %f1, %f2, %f3, %f4 }, { %r3, %r4 }, { %r6 }, { %f1, %f2, %f3, %f4 };")
    assert turing.split_mma("add.f32 %f1, %f2, %f3;") == "add.f32 %f1, %f2, %f3;"


def test_an_old_triton_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turing.triton, "__version__", "3.5.1")
    monkeypatch.setitem(turing._state, "installed", False)
    with pytest.raises(turing.TuringError, match=r"3\.5\.1 .*install 3\.6 or later"):
        turing.install()


def test_other_capabilities_do_not_need_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turing, "install", lambda: pytest.fail("installed"))
    turing.ensure(90)

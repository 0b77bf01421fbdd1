"""The layering rule: imports go down only, and `import qengine` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "qengine"

# Each part may import the parts named here, and itself.
BELOW = {
    "errors": set(),
    "allocator": set(),
    "config": {"errors"},
    "structured_outputs": {"errors"},
    "sampling_params": {"errors", "config", "structured_outputs"},
    "structured": {"errors", "config", "structured_outputs"},
    "outputs": set(),
    "kernels": set(),
    "checkpoint": {"errors"},
    "quant": {"errors", "checkpoint", "kernels"},
    "layers": {"errors", "quant", "checkpoint", "kernels"},
    "models": {"errors", "layers", "quant", "checkpoint", "kernels"},
    "engine": {"errors", "config", "sampling_params", "outputs", "models", "layers", "quant", "checkpoint", "kernels"},
    "perplexity": {"errors", "models", "layers"},
    "demo_model": {"errors"},
    "random_model": {"errors", "checkpoint"},
    "plan": {"errors", "config", "checkpoint", "kernels", "layers", "models", "quant", "random_model"},
}
BELOW["engine"] |= {"allocator", "random_model", "structured", "structured_outputs"}
BELOW["convert"] = {"allocator", "errors", "version", "models", "layers", "quant", "checkpoint", "kernels"}
BELOW["llm"] = BELOW["engine"] | {"engine", "perplexity"}
BELOW["async_llm"] = BELOW["llm"] | {"llm"}
BELOW["bench"] = BELOW["async_llm"] | {"async_llm", "plan"}
BELOW["server"] = BELOW["bench"] | {"bench"}


def imported(path: Path) -> set[tuple[str, int]]:
    """(part of qengine, line) for each import in a file; relative imports are resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
            if node.module == "qengine":
                names = [f"qengine.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level]
            names = [".".join((*base, node.module or ""))]
        found |= {(name.split(".")[1], node.lineno) for name in names if name.startswith("qengine.")}
    return found


def violations(part: str, path: Path) -> list[str]:
    allowed = BELOW[part] | {part, "__version__"}
    return [f"{path}:{line} imports {name}" for name, line in sorted(imported(path)) if name not in allowed]


@pytest.mark.parametrize("part", sorted(BELOW))
def test_imports_go_down_only(part):
    root = PACKAGE / part
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    files = [f for f in files if f.is_file()]
    assert files, f"qengine/{part} is gone: change the table"
    assert [v for f in files for v in violations(part, f)] == []


def test_every_part_is_in_the_table():
    parts = {p.stem for p in PACKAGE.iterdir() if not p.name.startswith("__")}
    assert parts - set(BELOW) - {"cli"} == set()


def test_an_upward_import_is_seen(tmp_path, monkeypatch):
    bad = PACKAGE / "quant" / "not_there.py"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "from qengine.engine import scheduler\n")
    assert violations("quant", bad) == [f"{bad}:1 imports engine"]


def test_import_is_light():
    code = "import sys, qengine; assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["kernels", "convert"])
def test_the_links_are_links(name):
    link = PACKAGE / name
    assert link.is_dir()
    assert not (link / "__init__.py").exists(), f"{name}/__init__.py would hide the package {name} from PyPI"

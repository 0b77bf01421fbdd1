"""The openai package for Node against a real server."""

import shutil
import subprocess
from pathlib import Path

import pytest
from http_server import running

FOLDER = Path(__file__).resolve().parent / "npm"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="needs node and npm"),
]


def test_the_npm_client(tmp_path):
    for name in ("package.json", "smoke.mjs"):
        shutil.copy(FOLDER / name, tmp_path)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=tmp_path, check=True, timeout=300)
    with running() as server:
        done = subprocess.run(
            ["node", "smoke.mjs", f"{server.url}/v1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.strip() == "ok", done.stderr
        server.wait_idle()

"""Whatever the OpenAPI description allows, and much that it does not: the server answers, never with 5xx."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import running

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("QENGINE_FUZZ_EXAMPLES", "150"))

pytestmark = pytest.mark.slow


def test_nothing_is_answered_5xx(tmp_path):
    """The command line of schemathesis, as `make test-fuzz` runs it."""
    program = Path(sys.executable).with_name("schemathesis")
    with running(engine={"max_logprobs": 20}, max_choices=64) as server:
        command = [str(program), "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--phases", "examples,coverage,fuzzing"]
        command += ["--request-timeout", "60", "--workers", "1", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        server.wait_idle()
        assert server.state.active == 0

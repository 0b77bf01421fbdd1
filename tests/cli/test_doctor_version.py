"""`qengine version`, `qengine doctor` and the top of the command line."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from vectors import vector_path

from qengine.cli import doctor
from qengine.cli.main import COMMANDS, app
from qengine.cli.version import versions

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, list(arguments), catch_exceptions=False)


def test_version_json_has_the_versions_in_use():
    import torch

    found = json.loads(run("version", "--json").stdout)
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(found) >= {"qengine", "python", "triton", "transformers", "safetensors", "numpy"}
    assert found["qengine"] in run("version").stdout


def test_a_package_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr("qengine.cli.version.PACKAGES", ("no-such-package-anywhere",))
    assert versions()["no-such-package-anywhere"] is None


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--help" in result.stdout
    if command not in ("version",):
        assert f"qengine {command}" in result.stdout, "the help shows no example"


def test_an_error_is_one_line_and_an_exit_code():
    command = [sys.executable, "-m", "qengine.cli.main", "inspect", "/nowhere/at/all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: /nowhere/at/all")
    assert "Traceback" not in done.stderr


def test_doctor_says_which_path_each_layer_takes():
    report = json.loads(run("doctor", str(vector_path("gptqmodel-gptq-dynamic")), "--device", "cpu", "--json").stdout)
    rows = {row["name"]: row for row in report["layers"]}
    assert rows["self_attn.q_proj"]["count"] == 2
    assert rows["mlp.down_proj"]["weights"] == "gptq 8-bit, group 32"
    assert rows["self_attn.k_proj"]["weights"] == "float16"
    assert all(row["path"] for row in rows.values())
    text = run("doctor", str(vector_path("gptqmodel-gptq-dynamic")), "--device", "cpu").stdout
    assert "self_attn.q_proj" in text


def test_doctor_finds_a_bad_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *a: [])
    (tmp_path / "config.json").write_text("[]")
    result = run("doctor", str(tmp_path), "--json")
    assert result.exit_code == 1
    [error] = [f for f in json.loads(result.stdout)["findings"] if f["level"] == "error"]
    assert "config.json" in error["text"]


def test_doctor_compares_versions_with_the_requirements(monkeypatch):
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["torch>=99", "no-such-package>=1", "x; extra=='y'"]
    )
    findings = []
    doctor.check_versions({}, findings)
    texts = [f.text for f in findings]
    assert any("torch" in t and ">=99 is needed" in t for t in texts)
    assert any("no-such-package is not installed" in t for t in texts)
    assert len(texts) == 2


def card(major, minor, free=15.0):
    return SimpleNamespace(name="Card", major=major, minor=minor), (int(free * 2**30), 16 * 2**30)


@pytest.mark.parametrize(
    ("major", "minor", "free", "said"),
    [
        (7, 5, 15.0, None),
        (9, 0, 15.0, None),
        (7, 0, 15.0, "sm_75 (Turing) or newer is needed"),
        (7, 5, 3.0, "13.0 GiB are in use"),
    ],
)
def test_doctor_judges_cards(monkeypatch, major, minor, free, said):
    import torch

    properties, memory = card(major, minor, free)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory)
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *a: ["Card, 580.1"])
    findings = []
    [found] = doctor.describe_cards(findings)
    assert found["sm"] == major * 10 + minor
    assert found["driver"] == "580.1"
    assert found["bfloat16"] is (major >= 8)
    assert [f.text for f in findings if said and said in f.text] or (said is None and not findings)


def test_doctor_sees_a_torch_that_cannot_use_the_card(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *a: ["Tesla T4, 535.1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = []
    assert doctor.describe_cards(findings) == []
    assert [(f.level, f.text[:26]) for f in findings] == [("warning", "CUDA_VISIBLE_DEVICES hides")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    findings = []
    assert doctor.describe_cards(findings) == []
    assert [f.level for f in findings] == ["error"]
    assert "Tesla T4" in findings[0].text

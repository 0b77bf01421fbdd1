"""`qengine serve`: options, their defaults, the configuration file, and what is refused before anything is loaded."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qengine import config
from qengine.cli import serve as command
from qengine.cli.main import app
from qengine.cli.serve_options import options
from qengine.errors import ConfigError
from qengine.server.settings import ServerSettings

KINDS = [getattr(config, name) for name in dir(config) if name.endswith("Config") and name != "EngineConfig"]


@pytest.fixture
def started(monkeypatch):
    """What would be served."""
    found = []
    monkeypatch.setattr(command, "run", lambda *args: found.append(args) or 0)
    return found


def serve(*arguments):
    result = CliRunner().invoke(app, ["serve", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_every_setting_is_an_option():
    known = {item.name for kind in (ServerSettings, *KINDS) for item in dataclasses.fields(kind)}
    assert {option.name for option in options()} == known - {"model"}


def test_defaults_are_those_of_the_settings(started):
    serve("m")
    [(model, settings, engine)] = started
    assert model == "m"
    assert settings == ServerSettings()
    assert engine == config.all_defaults()
    assert config.EngineConfig.from_kwargs(model="m", **engine) == config.EngineConfig.from_kwargs(model="m")


def test_options(started, monkeypatch):
    monkeypatch.setenv("QENGINE_API_KEY", "k1 k2")
    serve(
        "m", "--port", "1234", "--served-model-name", "a", "--served-model-name", "b", "--no-enable-prefix-caching",
        "--max-num-seqs", "7", "--gpu-memory-limit", "14.6", "--enforce-eager", "--kv-cache-dtype", "int8",
        "--chat-template", "{{ messages }}", "--request-timeout", "2.5", "--compile-workers", "2",
    )  # fmt: skip
    [(_, settings, engine)] = started
    assert (settings.port, settings.served_model_name, settings.api_key) == (1234, ("a", "b"), ("k1", "k2"))
    assert (settings.chat_template, settings.request_timeout) == ("{{ messages }}", 2.5)
    assert (engine["enable_prefix_caching"], engine["max_num_seqs"], engine["gpu_memory_limit"]) == (False, 7, 14.6)
    assert (engine["enforce_eager"], engine["kv_cache_dtype"], engine["compile_workers"]) == (True, "int8", 2)


def test_the_file_gives_defaults_and_the_command_line_goes_before(started, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ x }}")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: m\nport: 1\nmax-num-seqs: 3\nserved_model_name: one\napi-key: [a, b]\nenforce_eager: true\n"
        f"chat-template: {template}\nrequest-timeout: null\n"
    )
    serve("--config", str(file), "--port", "2")
    [(model, settings, engine)] = started
    assert (model, settings.port, settings.served_model_name) == ("m", 2, ("one",))
    assert (settings.api_key, settings.chat_template) == (("a", "b"), "{{ x }}")
    assert (engine["max_num_seqs"], engine["enforce_eager"], settings.request_timeout) == (3, True, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-num-sequences: 3", "did you mean 'max_num_seqs'"),
        ("- 1", "holds no options"),
        ("a: [", "is not YAML"),
        ("config: x", "unknown option 'config'"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, says):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        serve("--config", str(file), "m")


def test_a_files_value_of_the_wrong_type_is_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: eighty")
    assert serve("--config", str(file), "m").exit_code == 2


def test_what_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="give a model"):
        serve()
    with pytest.raises(ConfigError, match="neither Jinja text nor a file"):
        serve("m", "--chat-template", "nowhere.jinja")
    with pytest.raises(ConfigError, match="runs on one device"):
        serve("m", "--tensor-parallel-size", "2")
    with pytest.raises(ConfigError, match="port=70000"):
        serve("m", "--port", "70000")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'qengine\[serve\]'"):
        serve("m")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": -1}, "port"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests"),
        ({"request_timeout": 0}, "above 0"),
        ({"drain_timeout": -1}, "0 or more"),
        ({"ssl_keyfile": "x"}, "go together"),
        ({"root_path": "x"}, "begins with /"),
        ({"uvicorn_log_level": "loud"}, "one of"),
        ({"enable_auto_tool_choice": True}, "tool_call_parser"),
        ({"api_key": ("",)}, "not empty"),
        ({"max_body_size": True}, "whole number"),
    ],
)
def test_settings(given, says):
    with pytest.raises(ConfigError, match=says):
        ServerSettings(**given)


def test_the_table_in_the_documents_is_current():
    script = Path(__file__).resolve().parent.parent.parent / "docs" / "serving_options.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

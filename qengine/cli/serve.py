"""`qengine serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from qengine.cli.serve_options import ENGINE, options
from qengine.errors import ConfigError

HELP = """Serve a model over HTTP with OpenAI's API, as `vllm serve` does.

The page to chat and watch is at /, the API under /v1, its description at /docs. SIGTERM ends open requests, then stops.

[bold]Examples[/]

  qengine serve ./Qwen2.5-7B-Instruct-AWQ

  qengine serve ./model --host 0.0.0.0 --served-model-name qwen --max-concurrent-requests 256

  qengine serve --config serve.yaml
"""
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(**given: Any) -> None:
    """Read the options, load the model and serve. The signature, which typer reads, is made below."""
    import importlib.util

    del given["config"]
    model = given.pop("model")
    if model is None:
        raise ConfigError("give a model (folder or hub id), as MODEL or as `model` in the --config file")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"qengine serve needs {', '.join(missing)}, which is not installed; run pip install 'qengine[serve]'"
        )
    from qengine.server.settings import ServerSettings

    engine = {option.name: option.value(given.pop(option.name)) for option in options() if option.name in ENGINE}
    given["chat_template"] = read_template(given["chat_template"])
    settings = ServerSettings(**given)
    code = run(model, settings, engine)
    if code:
        raise typer.Exit(code)


def run(model: str, settings: Any, engine: dict[str, Any]) -> int:
    """Serve until the end; the exit code."""
    from transformers.utils import logging as transformers_logging

    from qengine.async_llm import AsyncLLM
    from qengine.config import EngineConfig
    from qengine.server.lifecycle import run_server

    EngineConfig.from_kwargs(model=model, **engine)  # a wrong setting is refused before anything is done
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("default", category=UserWarning)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    # The server bounds its requests itself: nothing waits outside the engine's queue.
    return run_server(AsyncLLM(model, max_waiting_requests=None, **engine), settings)


def read_template(given: str | None) -> str | None:
    """The text of a chat template: of a file, or what was given, if that is Jinja. Raises ConfigError."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={given!r} is neither Jinja text nor a file that can be read: {error}"
        ) from error


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Take the file's values as the options' defaults: what the command line says goes before. Raises ConfigError."""
    if path is None or context.resilient_parsing:
        return path
    values = load_yaml(path)
    known = {
        parameter.name: parameter for parameter in context.command.params if parameter.name not in ("config", "help")
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`qengine serve --help` lists the options"
            raise ConfigError(f"{path}: unknown option {key!r}; {hint}")
        if value is not None:
            several = known[name].multiple
            defaults[name] = [str(item) for item in _listed(value)] if several else value
    context.default_map = defaults
    return path


def load_yaml(path: str) -> dict[Any, Any]:
    """A YAML file's mapping. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("--config needs pyyaml; run pip install 'qengine[serve]'") from None
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; give a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no options; give lines such as `port: 8000`")
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _parameters() -> list[inspect.Parameter]:
    """MODEL, --config, then the options of all settings."""
    argument = typer.Argument(metavar="MODEL", help="A model folder or Hugging Face id.", show_default=False)
    file = typer.Option(
        "--config", help="YAML file with options by their names.", metavar="FILE", callback=read_config, is_eager=True
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    first = [
        inspect.Parameter("model", kind, default=None, annotation=Annotated[Optional[str], argument]),  # noqa: UP045
        inspect.Parameter("config", kind, default=None, annotation=Annotated[Optional[str], file]),  # noqa: UP045
    ]
    return first + [option.parameter() for option in options()]


serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {item.name: item.annotation for item in _parameters()}
serve.__doc__ = HELP

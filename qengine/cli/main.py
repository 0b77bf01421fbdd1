"""The `qengine` command: a table of commands, one file each, and one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape

from qengine.cli import bench, chat, convert, demo, dequantize, doctor, evaluate, generate, inspect, plan, tune, version
from qengine.errors import QEngineError

app = typer.Typer(
    name="qengine",
    help="Quantized inference for low-VRAM GPUs: convert, inspect, generate.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "generate": generate.generate,
    "chat": chat.chat,
    "convert": convert.convert,
    "inspect": inspect.inspect,
    "dequantize": dequantize.dequantize,
    "eval": evaluate.evaluate,
    "doctor": doctor.doctor,
    "plan": plan.plan,
    "bench": bench.bench,
    "tune": tune.tune,
    "version": version.version,
}
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and an exit code, never a traceback."""
    try:
        app()
    except QEngineError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()

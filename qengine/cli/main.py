"""The `qengine` command: a table of commands, one file each, and one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape

from qengine.cli import (
    bench,
    bench_serve,
    chat,
    convert,
    demo,
    dequantize,
    doctor,
    evaluate,
    generate,
    inspect,
    plan,
    serve,
    tune,
    version,
)
from qengine.errors import QEngineError


class TwoWords(typer.core.TyperGroup):
    """Commands of two words, like `bench serve`, beside one named by the first of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take the first two arguments for a command's name if they are one."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    name="qengine",
    cls=TwoWords,
    help="Quantized inference for low-VRAM GPUs: convert, inspect, generate, serve.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "generate": generate.generate,
    "chat": chat.chat,
    "serve": serve.serve,
    "convert": convert.convert,
    "inspect": inspect.inspect,
    "dequantize": dequantize.dequantize,
    "eval": evaluate.evaluate,
    "doctor": doctor.doctor,
    "plan": plan.plan,
    "bench": bench.bench,
    "bench serve": bench_serve.bench_serve,
    "tune": tune.tune,
    "version": version.version,
}
CONTEXT = {"bench serve": {"allow_extra_args": True}}
for _name, _function in COMMANDS.items():
    app.command(_name, context_settings=CONTEXT.get(_name))(_function)


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

"""`qengine chat`: talk with a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.cli import options as opt
from qengine.errors import RequestError

if TYPE_CHECKING:
    from qengine.llm import LLM
    from qengine.sampling_params import SamplingParams

HELP = """/reset  forget the conversation
/system TEXT  set the system message and forget the conversation
/help   this list
/exit   leave (also Ctrl-D)
Ctrl-C  stop the answer"""


def chat(
    model: opt.Model,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A system message.", metavar="TEXT", show_default=False),
    ] = None,
    max_tokens: Annotated[
        Optional[int],  # noqa: UP045
        opt.sampling("Most tokens of an answer (default: until the context ends).", metavar="N"),
    ] = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    dtype: opt.Dtype = opt.DEFAULTS["dtype"],
    device: opt.Device = opt.DEFAULTS["device"],
    quantization: opt.Quantization = None,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    max_model_len: opt.MaxModelLen = None,
    gpu_memory_utilization: opt.GpuMemory = opt.DEFAULTS["gpu_memory_utilization"],
    gpu_memory_limit: opt.GpuMemoryLimit = None,
    kv_cache_dtype: opt.KvCacheDtype = opt.DEFAULTS["kv_cache_dtype"],
    swap_space: opt.SwapSpace = opt.DEFAULTS["swap_space"],
    lm_head_dtype: opt.LmHeadDtype = opt.DEFAULTS["lm_head_dtype"],
    enforce_eager: opt.EnforceEager = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Talk with a model. The answer appears as it is made; Ctrl-C stops it, Ctrl-D leaves.

    [bold]Examples[/]

      qengine chat ./model

      qengine chat ./model --system "Answer in one sentence." --temperature 0.7
    """
    llm = opt.load_llm(
        model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        tokenizer=tokenizer,
        revision=revision,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        gpu_memory_limit=gpu_memory_limit,
        kv_cache_dtype=kv_cache_dtype,
        swap_space=swap_space,
        lm_head_dtype=lm_head_dtype,
        enforce_eager=enforce_eager,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    with llm:
        params = opt.sampling_params(
            llm,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
        )
        params.max_tokens = max_tokens
        if not llm.get_tokenizer().chat_template:
            raise RequestError(f"{model} has no chat template; use `qengine generate` with a prompt you format")
        Conversation(llm, params, system).run()


class Conversation:
    """Reads lines, answers them, remembers both."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def run(self) -> None:
        """Until /exit or the end of input."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 - gives input() editing and history

            typer.secho("/help lists the commands; /exit or Ctrl-D leaves.", dim=True)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.secho("\n/exit or Ctrl-D leaves.", dim=True)
                continue
            if line.startswith("/"):
                if self.command(line):
                    return
            elif line:
                self.answer(line)

    def command(self, line: str) -> bool:
        """Carry out a command; True if it ends the conversation."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return True
        if name == "/reset":
            self.reset()
            typer.secho("The conversation is forgotten.", dim=True)
        elif name == "/system":
            self.system = rest.strip() or None
            self.reset()
            typer.secho("The system message is set." if self.system else "No system message.", dim=True)
        elif name == "/help":
            typer.echo(HELP)
        else:
            typer.echo(f"{name} is not a command.\n{HELP}")
        return False

    def answer(self, text: str) -> None:
        """Stream the answer to `text`. One that was stopped stays in the conversation as far as it came."""
        messages = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        try:
            with interruptible() as interrupted:
                stream = self.llm.stream_chat(messages, self.params)
                for delta in stream:
                    typer.echo(delta.text, nl=False)
                    sys.stdout.flush()
                    parts.append(delta.text)
                    if interrupted:
                        typer.secho(" (stopped)", nl=False, dim=True)
                        break
                    if delta.finish_reason == "length":
                        typer.secho(" (cut off: max_tokens or the context's end)", nl=False, dim=True)
                stream.close()  # type: ignore[attr-defined]
        except RequestError as error:
            typer.secho(f"{error}\n/reset makes room.", fg="red", err=True)
            return
        typer.echo()
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """While it is open Ctrl-C does not raise but appends to the list it yields, so that no step is cut in half."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)

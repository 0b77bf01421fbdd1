"""`qengine eval`: perplexity of a model on a text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Optional

import typer

from qengine.cli import options as opt


def evaluate(
    model: opt.Model,
    text: Annotated[str, typer.Option(help='A UTF-8 text file; "-" is stdin.', metavar="FILE", show_default=False)],
    seq_len: Annotated[int, typer.Option(help="Tokens a window.", min=2, metavar="N")] = 2048,
    max_windows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Score only the first so many windows.", min=1, metavar="N", show_default=False),
    ] = None,
    as_json: opt.JsonFlag = False,
    device: opt.Device = opt.DEFAULTS["device"],
    dtype: opt.Dtype = "float32",
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Perplexity on a text.

    The text is tokenized once, without special tokens, and cut into windows of --seq-len tokens that do not overlap;
    a shorter rest is left out. Each window stands alone and scores its seq_len - 1 next-token predictions.
    nll is the mean negative log-likelihood a scored token in nats, perplexity its exponential.

    [bold]Examples[/]

      qengine eval ./model --text book.txt --seq-len 512

      qengine eval ./model-int4 --text book.txt --seq-len 512 --max-windows 20 --json
    """
    content = opt.read_text(text)
    from qengine.checkpoint import open_checkpoint
    from qengine.config import ModelConfig
    from qengine.engine.loading import load_tokenizer, refuse_remote_code, resolve_device, resolve_dtype
    from qengine.engine.progress import loading_progress
    from qengine.models import load_model
    from qengine.perplexity import check_windows, perplexity

    settings = ModelConfig(
        model=model,
        tokenizer=tokenizer,
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    ckpt = open_checkpoint(model, revision=revision, allow_pickle=allow_pickle)
    refuse_remote_code(ckpt, settings)
    target = resolve_device(device)
    token_ids = load_tokenizer(ckpt, settings)(content, add_special_tokens=False, verbose=False)["input_ids"]
    check_windows(len(token_ids), seq_len)
    with loading_progress() as progress:
        decoder = load_model(
            ckpt, dtype=resolve_dtype(settings.dtype, ckpt.text_config(), target), device=target, progress=progress
        )
    with loading_progress("scoring") as progress:
        result = perplexity(decoder, token_ids, seq_len, max_windows=max_windows, progress=progress)
    if as_json:
        typer.echo(json.dumps({"model": model, **asdict(result)}))
    else:
        typer.echo(f"perplexity {result.perplexity:.4f}")
        typer.echo(f"nll        {result.nll:.5f} nats a token")
        typer.echo(f"tokens     {result.tokens} in {result.windows} windows of {result.seq_len}")

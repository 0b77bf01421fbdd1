"""`qengine generate`: complete prompts from the command line or a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qengine.cli import options as opt
from qengine.errors import ConfigError

if TYPE_CHECKING:
    from qengine.outputs import CompletionOutput, RequestOutput


def generate(
    model: opt.Model,
    prompt: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--prompt", "-p", help="A prompt; may be repeated.", metavar="TEXT", show_default=False),
    ] = None,
    prompt_file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help='A prompt a line: text, or JSON {"prompt": ...}; "-" is stdin.', metavar="FILE", show_default=False
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt through the chat template.")] = False,
    max_tokens: Annotated[
        Optional[int],  # noqa: UP045
        opt.sampling("Most tokens generated (default: the model's, else 16).", metavar="N"),
    ] = None,
    min_tokens: Annotated[int, opt.sampling("No end before so many.", metavar="N")] = 0,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: Annotated[float, opt.sampling("Against tokens of the output (0).", metavar="X")] = 0.0,
    frequency_penalty: Annotated[float, opt.sampling("The same, for each occurrence (0).", metavar="X")] = 0.0,
    seed: opt.Seed = None,
    n: Annotated[int, opt.sampling("Completions a prompt (1).", "--n", "-n", metavar="N")] = 1,
    stop: opt.Stop = None,
    stop_token_ids: Annotated[
        Optional[list[int]],  # noqa: UP045
        opt.sampling("End at this token id; may be repeated.", metavar="ID"),
    ] = None,
    include_stop_str_in_output: Annotated[
        bool, opt.sampling("Keep the stop text.", "--include-stop-str-in-output")
    ] = False,
    ignore_eos: Annotated[bool, opt.sampling("Go on after end tokens.", "--ignore-eos")] = False,
    show_special_tokens: Annotated[
        bool, opt.sampling("Leave special tokens in the text.", "--no-skip-special-tokens")
    ] = False,
    logprobs: Annotated[
        Optional[int],  # noqa: UP045
        opt.sampling("With --json: so many logprobs a token.", metavar="N"),
    ] = None,
    as_json: opt.JsonFlag = False,
    dtype: opt.Dtype = opt.DEFAULTS["dtype"],
    device: opt.Device = opt.DEFAULTS["device"],
    quantization: opt.Quantization = None,
    tokenizer: opt.Tokenizer = None,
    revision: opt.Revision = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = opt.DEFAULTS["max_num_seqs"],
    max_num_batched_tokens: opt.MaxNumBatchedTokens = opt.DEFAULTS["max_num_batched_tokens"],
    block_size: opt.BlockSize = opt.DEFAULTS["block_size"],
    num_blocks: opt.NumBlocks = None,
    gpu_memory_utilization: opt.GpuMemory = opt.DEFAULTS["gpu_memory_utilization"],
    gpu_memory_limit: opt.GpuMemoryLimit = None,
    kv_cache_dtype: opt.KvCacheDtype = opt.DEFAULTS["kv_cache_dtype"],
    swap_space: opt.SwapSpace = opt.DEFAULTS["swap_space"],
    lm_head_dtype: opt.LmHeadDtype = opt.DEFAULTS["lm_head_dtype"],
    enforce_eager: opt.EnforceEager = False,
    no_prefix_caching: opt.NoPrefixCaching = False,
    engine_seed: opt.EngineSeed = opt.DEFAULTS["seed"],
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Complete prompts.

    Prompts come from --prompt and --prompt-file, in this order, and run together in one batch.

    [bold]Examples[/]

      qengine generate ./model --prompt "The capital of France is" --temperature 0

      qengine generate ./model --chat -p "Tell me a story" --max-tokens 200 --seed 1

      qengine generate ./model --prompt-file prompts.jsonl --max-tokens 64 --json > out.jsonl
    """
    prompts: list[Any] = list(prompt or [])
    if prompt_file is not None:
        prompts += parse_prompts(opt.read_text(prompt_file), prompt_file)
    if not prompts:
        raise ConfigError("no prompt was given; use --prompt TEXT or --prompt-file FILE")
    if chat and any(not isinstance(p, str) for p in prompts):
        raise ConfigError("--chat needs text prompts, but a line of the prompt file gives token ids")
    settings = {
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "tokenizer": tokenizer,
        "revision": revision,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "gpu_memory_limit": gpu_memory_limit,
        "kv_cache_dtype": kv_cache_dtype,
        "swap_space": swap_space,
        "lm_head_dtype": lm_head_dtype,
        "enforce_eager": enforce_eager,
        "enable_prefix_caching": not no_prefix_caching,
        "seed": engine_seed,
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
    }
    sampling = {
        "n": n,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "include_stop_str_in_output": include_stop_str_in_output,
        "ignore_eos": ignore_eos,
        "skip_special_tokens": not show_special_tokens,
        "logprobs": logprobs,
    }
    check_sampling(sampling)
    with opt.load_llm(model, **settings) as llm:
        params = opt.sampling_params(llm, **sampling)
        if chat:
            results = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
        else:
            results = llm.generate(prompts, params)
    for index, result in enumerate(results):
        if as_json:
            typer.echo(json.dumps(as_record(index, result), ensure_ascii=False))
        else:
            show(index, result, alone=len(results) == 1)


def check_sampling(values: dict[str, Any]) -> None:
    """Refuse wrong sampling options before the model is loaded."""
    from qengine.sampling_params import SamplingParams

    given = {name: value for name, value in values.items() if value is not None}
    if "max_tokens" not in given:
        given["max_tokens"] = None  # the model may set its own default, known only later
    SamplingParams(**given)


def parse_prompts(text: str, name: str) -> list[Any]:
    """One prompt a line; empty lines are left out. A line that begins with "{" is JSON with a prompt.

    Other keys of a JSON line are not read. Raises ConfigError with the line's number.
    """
    prompts: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        prompts.append(_json_prompt(line, f"{name}, line {number}") if line.lstrip().startswith("{") else line)
    if not prompts:
        raise ConfigError(f"{name}: has no prompts; give one a line")
    return prompts


def _json_prompt(line: str, place: str) -> Any:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{place}: begins with "{{" but is not JSON ({error.msg} at column {error.colno}); '
            'give {"prompt": "text"}, also for a text that begins with a brace'
        ) from error
    except RecursionError as error:
        raise ConfigError(f'{place}: is JSON nested too deep; give {{"prompt": "text"}}') from error
    if isinstance(record.get("prompt"), str):
        return record["prompt"]
    ids = record.get("prompt_token_ids")
    if isinstance(ids, list) and "prompt" not in record:
        return {"prompt_token_ids": ids}
    raise ConfigError(f'{place}: has no "prompt" with a text (or "prompt_token_ids" with a list); got {line[:80]}')


def as_record(index: int, result: RequestOutput) -> dict[str, Any]:
    """A result as --json prints it: the first completion's fields at the top, all of them under "outputs" if n > 1."""
    record: dict[str, Any] = {
        "index": index,
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        **_completion(result.outputs[0]),
    }
    if len(result.outputs) > 1:
        record["outputs"] = [{"index": output.index, **_completion(output)} for output in result.outputs]
    return record


def _completion(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["cumulative_logprob"] = output.cumulative_logprob
        record["logprobs"] = [
            [
                {"token_id": token, "token": item.decoded_token, "logprob": item.logprob, "rank": item.rank}
                for token, item in position.items()
            ]
            for position in output.logprobs
        ]
    return record


def show(index: int, result: RequestOutput, *, alone: bool) -> None:
    """A result for people: the prompt where there are several, then each completion."""
    if not alone:
        prompt = result.prompt if result.prompt is not None else f"{len(result.prompt_token_ids)} token ids"
        typer.secho(f"[{index}] {prompt}", bold=True)
    for output in result.outputs:
        if len(result.outputs) > 1:
            typer.secho(f"({output.index + 1})", dim=True)
        typer.echo(output.text)
    count = sum(len(output.token_ids) for output in result.outputs)
    reasons = ", ".join(dict.fromkeys(str(output.finish_reason) for output in result.outputs))
    typer.secho(f"{count} tokens, {reasons}", dim=True, err=True)

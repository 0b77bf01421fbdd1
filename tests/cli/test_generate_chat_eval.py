import json
import math
import warnings
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tiny_llm import copy_of, tiny_folder
from typer.testing import CliRunner

from qengine.cli.chat import chat
from qengine.cli.evaluate import evaluate
from qengine.cli.generate import generate, parse_prompts
from qengine.cli.options import load_llm
from qengine.errors import ConfigError, QEngineError, RequestError

app = typer.Typer()
for name, function in (("generate", generate), ("chat", chat), ("eval", evaluate)):
    app.command(name)(function)


@pytest.fixture(scope="module")
def folder():
    return str(tiny_folder()[1])


def run(*arguments, text=None):
    result = CliRunner().invoke(app, list(map(str, arguments)), input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def records(*arguments, text=None):
    result = run("generate", *arguments, "--json", text=text)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


GREEDY = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--dtype", "float32", "--device", "cpu")


def test_json_has_one_object_a_prompt_in_order(folder):
    got = records(folder, "--prompt", "Hello", "-p", "world", *GREEDY)
    assert [(r["index"], r["prompt"]) for r in got] == [(0, "Hello"), (1, "world")]
    for record in got:
        assert len(record["token_ids"]) == 5
        assert record["finish_reason"] == "length"
        assert isinstance(record["text"], str)
        assert record["prompt_token_ids"]
        assert "outputs" not in record


def test_n_gives_all_under_outputs_and_the_first_on_top(folder):
    sampling = ("--seed", 3, "--temperature", 1.5, "--max-tokens", 5, "--ignore-eos", "--logprobs", 2)
    [record] = records(folder, "-p", "Hello", "--n", 3, *sampling)
    assert [o["index"] for o in record["outputs"]] == [0, 1, 2]
    assert record["token_ids"] == record["outputs"][0]["token_ids"] != record["outputs"][1]["token_ids"]
    first = record["logprobs"][0][0]
    assert first["token_id"] == record["token_ids"][0]
    assert set(first) == {"token_id", "token", "logprob", "rank"}


def test_prompt_file_of_text_and_json_lines(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('Hello\n\n{"prompt": "two\\nlines", "id": 7}\r\n{"prompt_token_ids": [5, 6]}\n  spaced \n')
    got = records(folder, "--prompt-file", file, "-p", "first", *GREEDY)
    assert [r["prompt"] for r in got] == ["first", "Hello", "two\nlines", None, "  spaced "]
    assert got[3]["prompt_token_ids"] == [5, 6]
    piped = records(folder, "--prompt-file", "-", *GREEDY, text="Hello\n")
    assert piped[0]["token_ids"] == got[1]["token_ids"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ok\n{"prompt": "x"', r"f, line 2: begins with .* not JSON"),
        ('ok\n\n{"text": "x"}', r'f, line 3: has no "prompt"'),
        ('{"prompt": 5}', "f, line 1"),
        ("\n \n", "f: has no prompts"),
    ],
)
def test_bad_prompt_file_lines_are_named_by_number(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_prompts(text, "f")


def test_people_read_text_and_the_rest_is_on_stderr(folder):
    result = run("generate", folder, "-p", "Hello", "-p", "you", *GREEDY)
    assert result.exit_code == 0
    assert result.stdout.startswith("[0] Hello\n")
    assert "5 tokens, length" in result.stderr
    assert "5 tokens" not in result.stdout


def test_mistakes_come_before_the_model_is_loaded(folder, tmp_path):
    with pytest.raises(ConfigError, match="no prompt was given"):
        run("generate", folder)
    with pytest.raises(RequestError, match="top_p"):
        run("generate", "/no/such/model", "-p", "x", "--top-p", "2")
    with pytest.raises(ConfigError, match="cannot be read"):
        run("generate", folder, "--prompt-file", tmp_path / "none")
    with pytest.raises(QEngineError):
        run("generate", tmp_path / "none", "-p", "x")
    with pytest.raises(ConfigError, match="block_size=3"):
        run("generate", folder, "-p", "x", "--block-size", 3)


def test_chat_option_uses_the_template(folder):
    [record] = records(folder, "-p", "Hi", "--chat", *GREEDY)
    assert record["prompt"] == "<user>Hi\n<assistant>"


def test_help_names_defaults_and_examples():
    text = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, ["generate", "--help"]).output
    for word in ("--gpu-memory-utilization", "0.9", "--max-num-seqs", "256", "qengine generate ./model", "--stop"):
        assert word in text, word


def test_chat_answers_remembers_resets_and_leaves(folder):
    options = ("--temperature", "0", "--max-tokens", "4", "--system", "Be kind")
    lines = "Hello\n/help\n/nonsense\nAgain\n/reset\nHello\n/exit\nnever read\n"
    result = run("chat", folder, *options, text=lines)
    assert result.exit_code == 0
    assert result.stdout.count("/reset  forget") == 2
    assert "/nonsense is not a command" in result.stdout
    first, *_ = result.stdout.split("/reset  forget")
    assert result.stdout.split("The conversation is forgotten.\n")[1].strip("\n") == first.strip("\n")
    end = run("chat", folder, *options, text="Hello\n")
    assert end.exit_code == 0, "the end of input leaves"


def test_chat_that_outgrows_the_context_says_so_and_goes_on(folder):
    result = run("chat", folder, "--temperature", "0", "--max-tokens", "2", text="x" * 300 + "\nHi\n/exit\n")
    assert result.exit_code == 0
    assert "max_model_len=128" in result.stderr
    assert "/reset makes room" in result.stderr


def test_ctrl_c_stops_the_answer_not_the_program(folder, monkeypatch):
    import signal

    from qengine.engine.engine import Engine

    steps = []
    step = Engine.step

    def interrupted(self):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("chat", folder, "--temperature", "0", "--max-tokens", "50", text="Hello\n/help\n/exit\n")
    assert result.exit_code == 0
    assert "(stopped)" in result.stdout
    assert len(steps) == 3
    assert "/reset  forget" in result.stdout


def test_eval_scores_every_window_alone(folder, tmp_path):
    model, _ = tiny_folder()
    from toy_tokenizers import byte_level

    text = "The quick brown fox; numbers 123. " * 20
    ids = byte_level()(text, add_special_tokens=False)["input_ids"]
    file = tmp_path / "text.txt"
    file.write_text(text)
    result = run("eval", folder, "--text", file, "--seq-len", 20, "--json")
    got = json.loads(result.stdout)
    windows = [ids[i : i + 20] for i in range(0, len(ids) - 19, 20)]
    total = 0.0
    with torch.no_grad():
        for window in windows:
            logprobs = model(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1)
            total -= logprobs.gather(1, torch.tensor(window[1:])[:, None]).sum().item()
    assert len(windows) > 3
    assert got["tokens"] == 19 * len(windows)
    assert got["windows"] == len(windows)
    assert got["nll"] == pytest.approx(total / got["tokens"], abs=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(got["nll"]))
    one = json.loads(run("eval", folder, "--text", file, "--seq-len", 20, "--max-windows", 1, "--json").stdout)
    assert one["tokens"] == 19
    assert "perplexity" in run("eval", folder, "--text", file, "--seq-len", 20).stdout


def test_eval_mistakes_have_numbers(folder, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short")
    with pytest.raises(RequestError, match=r"the text has \d+ tokens, less than one window of seq_len=100"):
        run("eval", folder, "--text", file, "--seq-len", 100)
    file.write_text("long " * 500)
    with pytest.raises(RequestError, match="seq_len=129 is more than the model's 128"):
        run("eval", folder, "--text", file, "--seq-len", 129)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        run("eval", folder, "--text", file)


def test_long_windows_are_scored_in_slices():
    from tiny_models import load

    from qengine.perplexity import perplexity

    _, folder = tiny_folder(max_position_embeddings=400)
    decoder = load(folder)
    ids = torch.randint(3, 300, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    calls = []
    whole = perplexity(decoder, ids, 300, progress=lambda *x: calls.append(x))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    seen = []
    logits = decoder.logits
    decoder.logits = lambda hidden: (seen.append(len(hidden)), logits(hidden))[1]
    assert perplexity(decoder, ids, 300) == whole
    assert seen == [128, 128, 43] * 3


def test_json_nested_beyond_the_parser_is_named_by_line():
    with pytest.raises(ConfigError, match="f, line 2: is JSON nested too deep"):
        parse_prompts('ok\n{"prompt":' + "[" * 100_000, "f")


def test_warnings_with_brackets_are_printed_as_they_are(folder, monkeypatch, capsys):
    def load(model, **settings):
        warnings.warn("card [/odd] is slow", stacklevel=2)

    monkeypatch.setattr("qengine.llm.LLM", load)
    load_llm(folder)
    assert "warning: card [/odd] is slow" in capsys.readouterr().err


def test_eval_of_weights_that_give_nan_is_an_error_not_a_number(folder, tmp_path):
    copy = copy_of(Path(folder))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "text.txt"
    file.write_text("some text " * 20)
    with pytest.raises(QEngineError, match="loss of nan"):
        run("eval", copy, "--text", file, "--seq-len", 8, "--json")

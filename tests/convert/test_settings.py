import json

import pytest
import torch
from tiny_convert import convertible
from tiny_llm import copy_of
from typer.testing import CliRunner

from qengine.convert.calibration import bundled_text, read_documents, sample_windows
from qengine.convert.plan import make_plan
from qengine.convert.settings import resolve_settings
from qengine.errors import CheckpointError, ConfigError, UnsupportedError


def test_defaults_load_everywhere():
    def made(**options):
        settings = resolve_settings(**options)
        return settings.format, settings.sym

    assert made() == ("awq-gemm", False)
    assert made(method="rtn") == ("awq-gemm", False)
    assert made(method="gptq") == ("gptq", True)
    assert made(method="gptq", sym=False) == ("gptq_v2", False)
    assert made(method="rtn", bits=3) == ("gptq_v2", False)
    assert made(method="awq", format="gptq") == ("gptq", True)
    assert made(method="gptq", format="awq-gemm") == ("awq-gemm", False)
    assert made(format="compressed-tensors") == ("compressed-tensors", True)
    assert resolve_settings(method="gptq", format="gptq", sym=False).scheme(64).min_zero == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "--method='magic' is not known; allowed are rtn, awq, gptq, best"),
        ({"format": "gemv"}, "--format='gemv' is not known"),
        ({"bits": 3, "format": "awq-gemm"}, "whose readers know 4 bits; use --format gptq"),
        ({"bits": 5, "method": "gptq"}, "--bits=5 is not allowed"),
        ({"group_size": 4}, "--group-size=4"),
        ({"desc_act": True}, "means nothing to --method awq"),
        ({"method": "gptq", "desc_act": True, "format": "compressed-tensors"}, "has no place for"),
        ({"samples": 0}, "--samples=0"),
        ({"seq_len": 0}, "--seq-len=0"),
        ({"device": "gpu"}, "is not a device"),
        ({"device": "meta"}, "only cpu and cuda"),
    ],
)
def test_refused_before_anything_is_read(options, words):
    with pytest.raises(ConfigError) as error:
        resolve_settings(**options)
    assert words in str(error.value)


def test_plan_prefers_one_group_for_all():
    shapes = {"a.q_proj": (64, 576), "a.down_proj": (64, 1536)}
    for format in ("awq-gemm", "gptq", "compressed-tensors"):
        plan, notes = make_plan(shapes, resolve_settings(format=format))
        assert plan.group_size == 64
        assert set(plan.groups.values()) == {64}
        assert notes == ["group size 64 instead of 128 for the whole model: 128 does not divide in_features 576"]
    plan, notes = make_plan(shapes, resolve_settings(group_size=-1))
    assert plan.group_size == -1
    assert not notes
    with pytest.raises(UnsupportedError, match="no layer can be quantized"):
        make_plan({"a.q_proj": (33, 251)}, resolve_settings())
    shapes = {"a.q_proj": (64, 200), "b.q_proj": (64, 200), "b.down_proj": (64, 256)}
    plan, notes = make_plan(shapes, resolve_settings())
    assert plan.groups == {"a.q_proj": 100, "b.q_proj": 100}  # one group size for all: the one that most can have
    assert list(plan.plain) == ["b.down_proj"]
    assert len(notes) == 2
    plan, notes = make_plan(shapes, resolve_settings(method="gptq", bits=8))
    assert plan.groups == {"a.q_proj": 100, "b.q_proj": 100, "b.down_proj": 128}
    assert len(notes) == 2


def test_bundled_texts_do_not_overlap():
    calibration, evaluation = bundled_text(), bundled_text("evaluation.txt")
    assert len(calibration) > 1_000_000
    assert 150_000 < len(evaluation) < 300_000
    shingles = {calibration[i : i + 60] for i in range(len(calibration) - 60)}
    assert not any(evaluation[i : i + 60] in shingles for i in range(0, len(evaluation) - 60))


def test_calibration_files(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        json.dumps({"text": "ěšč"}) + "\n\n" + json.dumps({"text": "two", "id": 1}) + "\n", encoding="utf-8"
    )
    assert read_documents(lines) == ["ěšč", "two"]
    plain = tmp_path / "a.txt"
    plain.write_bytes("\ufeffone\ntwo".encode())
    assert read_documents(plain) == ["one\ntwo"]


def test_conversations_go_through_the_template(tmp_path):
    from qengine.convert.calibration import load_tokenizer, tokenize

    _, folder = convertible()
    tokenizer = load_tokenizer(folder)
    chat = [{"role": "user", "content": "Who swims?"}, {"role": "assistant", "content": "The whale."}]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"text": "sea"}) + "\n")
    documents = read_documents(file)
    assert documents == [chat, "sea"]
    text = tokenizer.decode(tokenize(tokenizer, documents))
    assert tokenizer.apply_chat_template(chat, tokenize=False) in text
    assert text.endswith("sea")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="conversation 0 cannot be put into the tokenizer's chat template"):
        tokenize(tokenizer, documents)


def test_datasets_of_the_hub(monkeypatch):
    from types import SimpleNamespace

    from qengine.convert import documents

    asked = []

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split, streaming))
        if path == "gone":
            raise ValueError("no such data set")
        return iter([{"text": "one"}, {"text": "two" * 10}, {"text": "three"}])

    monkeypatch.setattr(documents, "ENOUGH", 20)
    monkeypatch.setattr(documents.importlib, "import_module", lambda name: SimpleNamespace(load_dataset=load_dataset))
    assert read_documents("dataset:wiki:raw@test") == ["one", "two" * 10]
    assert read_documents("dataset:wiki")[0] == "one"
    assert asked == [("wiki", "raw", "test", True), ("wiki", None, "train", True)]
    with pytest.raises(ConfigError, match="dataset:gone: cannot be loaded"):
        read_documents("dataset:gone")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "Who?"}]
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two"]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"messages": [chat]}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"other": [1]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"nothing of the kind")
    assert read_documents(tmp_path / "a.parquet") == ["one", "two"]
    assert read_documents(tmp_path / "b.parquet") == [chat]
    for name, words in (("c", 'neither a string "text" nor "messages", but other'), ("d", "is no parquet file")):
        with pytest.raises(ConfigError, match=words):
            read_documents(tmp_path / f"{name}.parquet")


def test_libraries_that_are_not_there_are_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for source in ("dataset:wiki", tmp_path / "a.parquet"):
        with pytest.raises(ConfigError, match=r"pip install 'qengine\[datasets\]'"):
            read_documents(source)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b" \n\t ", "holds no text"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"abc\xff\xfe", "byte 3 is not UTF-8"),
        ("a.txt", b"PAR1\0\0", "NUL bytes"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', 'line 2: expected an object with a string "text"'),
        ("a.jsonl", b'{"text": "a"\n', "line 1: not JSON"),
        ("a.jsonl", b'["a"]\n', "line 1: expected an object"),
        (None, b"", "no such file"),
    ],
)
def test_calibration_errors(tmp_path, name, content, words):
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_documents(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_windows():
    ids = torch.arange(1000)
    one = sample_windows(ids, 8, 50, seed=3, vocab_size=1000)
    assert one.shape == (8, 50)
    assert torch.equal(one, sample_windows(ids, 8, 50, seed=3, vocab_size=1000))
    assert not torch.equal(one, sample_windows(ids, 8, 50, seed=4, vocab_size=1000))
    assert one.unique().numel() == 400
    started = sample_windows(ids, 8, 50, seed=3, vocab_size=1000, start=[7, 8])
    assert bool((started[:, :2] == torch.tensor([7, 8])).all())
    with pytest.raises(ConfigError, match=r"has 1000 tokens, 21 samples of 50 need 1050.*--samples to 20"):
        sample_windows(ids, 21, 50, seed=0, vocab_size=1000)
    with pytest.raises(ConfigError, match="--seq-len to 1000"):
        sample_windows(ids, 1, 2000, seed=0, vocab_size=1000)
    with pytest.raises(CheckpointError, match="makes token 999, the model has 500"):
        sample_windows(ids, 8, 50, seed=0, vocab_size=500)


def test_command_line(tmp_path, text_file):
    from qengine.cli.main import app

    _, folder = convertible()
    flags = ["--samples", "4", "--seq-len", "32", "--group-size", "32", "--calibration", str(text_file)]
    base = ["convert", str(folder), "--out", str(tmp_path / "out"), *flags]
    done = CliRunner().invoke(app, [*base, "--method", "gptq", "--format", "gptq_v2", "--asym", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["settings"]["format"] == "gptq_v2"
    assert report["settings"]["sym"] is False
    assert report["calibration_tokens"] == 128
    assert len(report["linears"]) == 21
    again = CliRunner().invoke(app, base)
    assert isinstance(again.exception, ConfigError)
    forced = CliRunner().invoke(app, [*base, "--force"])
    assert forced.exit_code == 0
    assert "q_proj" in forced.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"


def test_missing_tokenizer_is_said(tmp_path, text_file):
    from tiny_convert import quick_convert

    _, folder = convertible()
    bare = copy_of(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(CheckpointError, match="tokenizer does not load"):
        quick_convert(bare, tmp_path / "out", text_file)
    quick_convert(bare, tmp_path / "out", text_file, method="rtn")

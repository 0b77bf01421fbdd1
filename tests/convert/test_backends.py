"""Conversions by other libraries, with packages that look like them: what they are given, refusals, broken results."""

import importlib
import json
import os
import sys

import pytest
import torch
from fake_peers import write_fakes
from tiny_convert import convertible, quick_convert
from tiny_llm import copy_of
from typer.testing import CliRunner

from qengine.checkpoint import open_checkpoint
from qengine.convert.backends.convert import convert_with_backend
from qengine.convert.backends.job import PeerJob
from qengine.convert.backends.launch import environment
from qengine.convert.backends.options import backend_settings
from qengine.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError
from qengine.quant import open_weights

FAKES = ("awq", "gptqmodel", "optimum", "fake_common")
QUICK = {"samples": 4, "seq_len": 48, "group_size": 32}


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in FAKES]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def source():
    return convertible(num_hidden_layers=2)[1]


@pytest.fixture(scope="module")
def made(source, tmp_path_factory, text_file):
    """What the packages save: method and format -> folder."""
    base = tmp_path_factory.mktemp("made")
    for name, options in {
        "gptq": {"method": "gptq"},
        "gptq3": {"method": "gptq", "bits": 3},
        "awq-gemm": {"method": "awq"},
    }.items():
        quick_convert(source, base / name, text_file, **options)
        (base / name / "report.json").unlink()
    return base


@pytest.fixture
def peers(tmp_path, monkeypatch, made):
    """The packages on the path, and the file of their notes."""
    monkeypatch.syspath_prepend(write_fakes(tmp_path / "fakes"))
    monkeypatch.setenv("FAKE_NOTES", str(tmp_path / "notes.json"))
    monkeypatch.setenv("FAKE_MADE", str(made / "gptq"))
    forget()
    yield tmp_path / "notes.json"
    forget()


def job(backend, source, out, **edits):
    out.mkdir(exist_ok=True)
    values = {
        "backend": backend,
        "source": str(source),
        "out": str(out),
        "windows": [[5, 6, 7, 8]] * 3,
        "method": "gptq",
        "format": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "device": "cpu",
        "seed": 0,
    }
    return PeerJob(**{**values, **edits})


def run_here(task):
    importlib.import_module(f"qengine.convert.backends.{task.backend}").quantize(task)


def test_what_gptqmodel_is_given(source, tmp_path, peers):
    run_here(job("gptqmodel", source, tmp_path / "out", bits=3, sym=False, format="gptq_v2"))
    notes = json.loads(peers.read_text())
    assert notes["config"] == {
        "bits": 3,
        "group_size": 32,
        "sym": False,
        "quant_method": "gptq",
        "format": "gptq_v2",
        "desc_act": False,
    }
    assert notes["load"] == {"dtype": "torch.float32", "device": "cpu"}
    assert notes["data"] == [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 1]}] * 3
    assert notes["quantize"] == {"batch_size": 1, "backend": "auto"}
    run_here(job("gptqmodel", source, tmp_path / "out", desc_act=True, device="cuda"))
    notes = json.loads(peers.read_text())
    assert notes["config"]["desc_act"] is True
    assert notes["config"]["act_group_aware"] is False
    assert notes["load"] == {"dtype": "torch.float16", "device": "cuda:0"}
    run_here(job("gptqmodel", source, tmp_path / "out", method="awq", format="awq-gemm"))
    notes = json.loads(peers.read_text())
    assert (notes["config"]["quant_method"], notes["config"]["format"]) == ("awq", "gemm")
    assert notes["quantize"]["backend"] == "awq_torch"


def test_what_autoawq_is_given(source, tmp_path, peers):
    run_here(job("autoawq", source, tmp_path / "out", method="awq", format="awq-gemm", sym=False))
    notes = json.loads(peers.read_text())
    assert notes["source"] == str(source)
    assert notes["load"] == {"torch_dtype": "torch.float32", "device_map": "cpu"}
    assert notes["quantize"] == {
        "quant_config": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        "calib_data": [[5, 6, 7, 8]] * 3,
        "max_calib_samples": 3,
        "max_calib_seq_len": 4,
    }


def test_autoawq_keeps_weights_on_a_cpu(peers):
    from awq.quantize.quantizer import AwqQuantizer

    from qengine.convert.backends.autoawq import mend

    def searched():
        module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        before = module[0].weight.detach().clone()
        AwqQuantizer()._compute_best_scale(1, None, None, module, [module[0]], None, kwargs={})
        assert "state_dict" not in vars(module)
        return torch.equal(module[0].weight, before)

    assert not searched()
    mend()
    assert searched()


def test_autoawq_of_another_version_is_refused_on_a_cpu(source, tmp_path, monkeypatch, peers):
    monkeypatch.syspath_prepend(write_fakes(tmp_path / "newer", autoawq="0.3.0"))
    with pytest.raises(UnsupportedError, match=r"ruins the weights on a CPU.*known for 0.2.9 only, 0.3.0"):
        run_here(job("autoawq", source, tmp_path / "out", method="awq", format="awq-gemm"))
    assert not any((tmp_path / "out").iterdir())
    run_here(job("autoawq", source, tmp_path / "out", method="awq", format="awq-gemm", device="cuda"))
    assert json.loads(peers.read_text())["load"]["torch_dtype"] == "torch.float16"


@pytest.mark.parametrize("sym", [True, False])
def test_optimum_says_in_config_what_it_saved(sym, source, tmp_path, peers):
    run_here(job("optimum", source, tmp_path / "out", sym=sym, desc_act=not sym))
    notes = json.loads(peers.read_text())
    assert notes["config"] == {
        "bits": 4,
        "group_size": 32,
        "sym": sym,
        "desc_act": not sym,
        "act_group_aware": sym,
        "model_seqlen": 4,
    }
    assert notes["data"] == [{"input_ids": [[5, 6, 7, 8]], "attention_mask": [[1, 1, 1, 1]]}] * 3
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == ("gptq" if sym else "gptq_v2")
    assert "dataset" not in said


REFUSALS = [
    ("magic", {}, "--backend='magic' is not known; allowed are autoawq, optimum, gptqmodel"),
    ("autoawq", {"resume": True}, "--resume: AutoAWQ keeps nothing"),
    ("autoawq", {"keep": {"lm_head": 8}}, "--keep: AutoAWQ is given one grid"),
    ("autoawq", {"method": "gptq"}, "--method gptq: AutoAWQ has no such method, only awq"),
    ("gptqmodel", {"method": "best"}, "--method best: GPTQModel has no such method, only gptq, awq"),
    ("optimum", {"method": "rtn"}, "--method rtn: Optimum has no such method"),
    ("gptqmodel", {"format": "compressed-tensors"}, "--format compressed-tensors: GPTQModel does not write it"),
    ("autoawq", {"format": "gptq"}, "--format gptq: AutoAWQ does not write it"),
    ("autoawq", {"bits": 8}, "--bits=8 is not allowed with --format awq-gemm"),
    ("autoawq", {"desc_act": True}, "means nothing to --method awq"),
    ("autoawq", {"group_size": -1}, "do not agree on it"),
    ("autoawq", {"sym": True}, "--sym: AutoAWQ cannot pack gemm without zero points"),
    ("optimum", {"format": "gptq", "sym": False}, "use --format gptq_v2"),
    ("optimum", {"format": "gptq_v2", "sym": True}, "use --format gptq$"),
]


@pytest.mark.parametrize(("backend", "options", "words"), REFUSALS, ids=str)
def test_refused_before_anything_is_read(backend, options, words, tmp_path, peers):
    with pytest.raises(ConfigError, match=words):
        convert_with_backend(tmp_path / "no-such-model", tmp_path / "out", backend=backend, **options)


@pytest.mark.parametrize("backend", ["autoawq", "optimum", "gptqmodel"])
def test_missing_package(backend, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=rf"pip install 'qengine\[{backend}\]'"):
        convert_with_backend(tmp_path, tmp_path / "out", backend=backend)


def test_defaults(peers):
    def made(backend, **options):
        settings = backend_settings(backend, **options)
        return settings.method, settings.format, settings.sym

    assert made("autoawq") == ("awq", "awq-gemm", False)
    assert made("gptqmodel") == made("optimum") == ("gptq", "gptq", True)
    assert made("gptqmodel", sym=False) == made("optimum", sym=False) == ("gptq", "gptq_v2", False)
    assert made("gptqmodel", method="awq", sym=True) == ("awq", "awq-gemm", True)
    assert made("gptqmodel", format="gptq", sym=False) == ("gptq", "gptq", False)


def test_converts_in_a_process_of_its_own(source, tmp_path, text_file, peers, capfd):
    from qengine.cli.main import app

    command = ["convert", str(source), "--out", str(tmp_path / "out"), "--backend", "gptqmodel", "--json"]
    command += ["--samples", "4", "--seq-len", "48", "--group-size", "32", "--calibration", str(text_file)]
    command += ["--seed", "3", "--evaluate"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    captured = capfd.readouterr()
    assert "peer's own output" in captured.err
    assert "peer's own output" not in captured.out
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["backend"] == "gptqmodel"
    assert saved["versions"]["gptqmodel"] == "7.6.0"
    assert (saved["settings"]["method"], saved["settings"]["seed"], saved["settings"]["sym"]) == ("gptq", 3, True)
    assert saved["linears"] == 14
    assert saved["evaluation"]["after"] == report["evaluation"]["after"]
    assert saved["calibration_perplexity"]["after"] < 1.2 * saved["calibration_perplexity"]["before"]
    assert "--backend gptqmodel --method gptq --format gptq" in saved["command"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    notes = json.loads(peers.read_text())
    assert notes["source"] == str(source)
    assert len(notes["data"]) == 4
    assert [row["input_ids"] for row in notes["data"]] == drawn(source, text_file, 3)
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ConfigError)


def drawn(source, text_file, seed):
    from qengine.convert.calibration import load_tokenizer, read_documents, sample_windows, start_tokens, tokenize

    tokenizer = load_tokenizer(source)
    ids = tokenize(tokenizer, read_documents(text_file))
    return sample_windows(ids, 4, 48, seed=seed, vocab_size=320, start=start_tokens(tokenizer)).tolist()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("partial", UnsupportedError, r"its quantizer failed \(RuntimeError: no kernel for this card\)"),
        ("exit", UnsupportedError, "ended with exit status 3"),
        ("kill", CapacityError, "killed, mostly for want of memory"),
    ],
)
def test_a_failing_peer_changes_nothing(fault, kind, words, source, tmp_path, text_file, monkeypatch, peers):
    monkeypatch.setenv("FAKE_FAULT", fault)
    out = tmp_path / "here" / "out"
    out.mkdir(parents=True)
    (out / "old").write_text("kept")
    with pytest.raises(kind, match=words):
        convert_with_backend(source, out, backend="gptqmodel", calibration=text_file, force=True, **QUICK)
    assert os.listdir(out.parent) == ["out"]
    assert os.listdir(out) == ["old"]


@pytest.fixture
def in_process(monkeypatch, peers):
    """No process of its own: the fault is in what it saved."""

    def run(task, device):
        run_here(task)
        return {"seconds": 1.0, "versions": {}}

    monkeypatch.setattr("qengine.convert.backends.convert.run_peer", run)


def test_another_grid_than_asked_for(source, tmp_path, text_file, made, monkeypatch, in_process):
    monkeypatch.setenv("FAKE_MADE", str(made / "gptq3"))
    with pytest.raises(CheckpointError, match="did not do what it was told"):
        convert_with_backend(source, tmp_path / "out", backend="gptqmodel", calibration=text_file, **QUICK)
    assert not (tmp_path / "out").exists()


def test_nothing_quantized(source, tmp_path, text_file, monkeypatch, in_process):
    monkeypatch.setenv("FAKE_MADE", str(source))
    with pytest.raises(CheckpointError, match="holds no quantized layer"):
        convert_with_backend(source, tmp_path / "out", backend="gptqmodel", calibration=text_file, **QUICK)


def test_ruined_weights_are_said(source, tmp_path, text_file, made, monkeypatch, in_process):
    from safetensors.torch import load_file, save_file

    ruined = copy_of(made / "awq-gemm")
    tensors = load_file(ruined / "model.safetensors")
    save_file({n: t * 40 if n.endswith("norm.weight") else t for n, t in tensors.items()}, ruined / "model.safetensors")
    monkeypatch.setenv("FAKE_MADE", str(ruined))
    report = convert_with_backend(source, tmp_path / "out", backend="autoawq", calibration=text_file, **QUICK)
    assert "probably ruined" in report.warnings[0]
    assert report.after > 2 * report.before


def test_a_width_without_a_common_group(tmp_path, text_file, in_process):
    folder = convertible(num_hidden_layers=1, intermediate_size=104)[1]
    with pytest.raises(UnsupportedError, match=r"AutoAWQ quantizes every layer|has one size"):
        convert_with_backend(folder, tmp_path / "out", backend="autoawq", calibration=text_file, **QUICK)


def test_a_quantized_source_is_refused(made, tmp_path, peers):
    with pytest.raises(UnsupportedError, match=r"wants plain weights.*qengine dequantize"):
        convert_with_backend(made / "gptq", tmp_path / "out", backend="gptqmodel")
    assert open_weights(open_checkpoint(made / "gptq")).method == "gptq"


def test_only_the_chosen_card_is_seen(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert environment("cuda")["CUDA_VISIBLE_DEVICES"] == "4"
    assert environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"

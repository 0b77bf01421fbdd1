"""Opening folders: one file or many, with and without an index; what is missing or misplaced is named."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from qengine.checkpoint import open_checkpoint
from qengine.checkpoint.writer import Entry, new_folder, split_shards, write_shards
from qengine.errors import CheckpointError, ConfigError


def tensors():
    return {
        "a.weight": torch.randn(5, 7),
        "b.weight": torch.randn(3, 2).half(),
        "c.bias": torch.randn(9).bfloat16(),
        "d": torch.randint(-9, 9, (4,)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def folder(path, config='{"model_type": "llama"}'):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    return path


def sharded(path, *, index=True, names=("model-00001-of-00002", "model-00002-of-00002")):
    folder(path)
    data = tensors()
    halves = [dict(list(data.items())[:3]), dict(list(data.items())[3:])]
    weight_map = {}
    for name, half in zip(names, halves, strict=True):
        save_file(half, path / f"{name}.safetensors")
        weight_map.update(dict.fromkeys(half, f"{name}.safetensors"))
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path, data


def assert_same(checkpoint, data):
    assert set(checkpoint.tensors) == set(data)
    for name, tensor in data.items():
        info = checkpoint.tensors[name]
        loaded = checkpoint.tensors.load(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert info.nbytes == tensor.numel() * tensor.element_size()
        assert torch.equal(loaded, tensor)
        assert loaded.dtype == tensor.dtype


def rejects(path, *words, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, **kwargs)
    for word in words:
        assert str(word) in str(caught.value)


def test_one_file(tmp_path):
    data = tensors()
    save_file(data, folder(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert_same(checkpoint, data)
    assert checkpoint.path == tmp_path
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.tensors.metadata == {"format": "pt"}
    assert checkpoint.tensors.nbytes == sum(t.numel() * t.element_size() for t in data.values())
    assert torch.equal(checkpoint.tensors.load("a.weight", slice(1, 3)), data["a.weight"][1:3])
    with pytest.raises(CheckpointError, match=r"'z.weight' is not in the checkpoint"):
        checkpoint.tensors.load("z.weight")


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path):
    data = {"a": torch.ones(4096)}
    save_file(data, folder(tmp_path) / "model.safetensors")
    open_checkpoint(tmp_path).tensors.load("a").zero_()
    assert_same(open_checkpoint(tmp_path), data)


def test_every_dtype(tmp_path):
    kinds = [torch.float64, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.bool]
    data = {str(kind): torch.randint(0, 2, (3, 3)).to(kind) for kind in kinds}
    save_file(data, folder(tmp_path) / "model.safetensors")
    assert_same(open_checkpoint(tmp_path), data)


def test_an_unaligned_buffer(tmp_path):
    """Old writers did not pad the header: float data then begin at an odd byte."""
    value = torch.randn(6)
    header = json.dumps({"x": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    header += b" " * ((1 - len(header)) % 2)  # odd length
    raw = len(header).to_bytes(8, "little") + header + value.numpy().tobytes()
    (folder(tmp_path) / "model.safetensors").write_bytes(raw)
    assert_same(open_checkpoint(tmp_path), {"x": value})


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, index):
    path, data = sharded(tmp_path, index=index)
    assert_same(open_checkpoint(path), data)


def test_shards_of_other_names(tmp_path):
    path, data = sharded(tmp_path, index=False, names=("part_a", "part_b"))
    save_file({"logits": torch.zeros(1)}, path / "logits.safetensors")
    save_file({"lora": torch.zeros(1)}, path / "adapter_model.safetensors")
    assert_same(open_checkpoint(path), data)


def test_one_file_of_another_name(tmp_path):
    data = tensors()
    save_file(data, folder(tmp_path) / "gptq_model-4bit-128g.safetensors")
    assert_same(open_checkpoint(tmp_path), data)


def test_a_leftover_index_beside_the_single_file(tmp_path):
    path, data = sharded(tmp_path)
    save_file(data, path / "model.safetensors")
    assert_same(open_checkpoint(path), data)


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard(tmp_path, index):
    path, _ = sharded(tmp_path, index=index)
    (path / "model-00002-of-00002.safetensors").unlink()
    rejects(path, path, "missing", "2", "download")


def test_two_sets_of_shards(tmp_path):
    path, _ = sharded(tmp_path, index=False)
    save_file({"x": torch.zeros(1)}, path / "model-00001-of-00003.safetensors")
    rejects(path, "several sets of shards", "model-*-of-2", "model-*-of-3")


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_shards(tmp_path, index):
    path, data = sharded(tmp_path, index=index)
    second = dict(list(data.items())[3:]) | {"a.weight": data["a.weight"]}
    save_file(second, path / "model-00002-of-00002.safetensors")
    rejects(path, "'a.weight'", "model-00001-of-00002", "model-00002-of-00002")


def test_an_index_naming_a_tensor_that_is_not_there(tmp_path):
    path, _ = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    rejects(path, "'ghost.weight'", "in none of the shards")
    del content["weight_map"]["ghost.weight"]
    content["weight_map"]["a.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    rejects(path, "'a.weight'", "it is in model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x", "", None, 3, "x\0"]
)
def test_an_index_that_leaves_the_folder(tmp_path, place):
    path, _ = sharded(tmp_path / "model")
    save_file({"secret": torch.zeros(1)}, tmp_path / "x.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"secret": place}}))
    rejects(path, "'secret'", "not a file of this folder")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff"])
def test_a_broken_index(tmp_path, content):
    path, _ = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    rejects(path, "model.safetensors.index.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_config(tmp_path, content, name):
    save_file(tensors(), folder(tmp_path) / "model.safetensors")
    (tmp_path / name).write_bytes(content)
    rejects(tmp_path, name)


def test_no_config(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    rejects(tmp_path, "no config.json")


def test_no_weights(tmp_path):
    rejects(folder(tmp_path), "no *.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    rejects(tmp_path, "GGUF", "original Hugging Face")
    (tmp_path / "adapter_config.json").write_text("{}")
    rejects(tmp_path, "LoRA", "merge")


def test_no_tensors(tmp_path):
    (folder(tmp_path) / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rejects(tmp_path, "no tensors")


def test_names_that_are_no_folder(tmp_path, monkeypatch):
    rejects(tmp_path / "nothing here", "no such folder")
    (tmp_path / "file").write_text("")
    rejects(tmp_path / "file", "is a file")
    rejects("../no/such/folder", "no such folder")


def test_a_hub_id_without_a_network(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rejects("no-such-org/no-such-model", "no-such-org/no-such-model", "hub", "downloaded folder")


def test_a_hub_id_is_fetched_without_pickles(tmp_path, monkeypatch):
    import huggingface_hub

    data = tensors()
    save_file(data, folder(tmp_path) / "model.safetensors")
    asked = {}

    def snapshot(name, *, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert_same(open_checkpoint("org/model", revision="v1"), data)
    assert (asked["name"], asked["revision"]) == ("org/model", "v1")
    assert "*.safetensors" in asked["patterns"]
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in asked["patterns"])


def test_text_config_of_a_multimodal_wrapper(tmp_path):
    config = {
        "architectures": ["Wrapper"],
        "model_type": "outer",
        "text_config": {"model_type": "inner", "hidden_size": 8},
    }
    save_file(tensors(), folder(tmp_path, json.dumps(config)) / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    assert checkpoint.text_config() == {"architectures": ["Wrapper"], "model_type": "inner", "hidden_size": 8}


# Pickles


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil_was_here",)


def test_pickles_only_when_asked(tmp_path):
    data = tensors()
    torch.save(data, folder(tmp_path) / "pytorch_model.bin")
    rejects(tmp_path, "pickle", "allow_pickle", "safetensors")
    assert_same(open_checkpoint(tmp_path, allow_pickle=True), data)


def test_pickles_never_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(1), "b": Evil()}, folder(tmp_path) / "pytorch_model.bin")
    rejects(tmp_path, "pytorch_model.bin", "more than tensors", allow_pickle=True)
    assert not (tmp_path / "evil_was_here").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"not a pickle", b"\x80\x02}q\x00."]
)  # the last: an empty dictionary
def test_broken_pickles(tmp_path, content):
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(content)
    rejects(tmp_path, tmp_path, allow_pickle=True)


def test_safetensors_come_before_pickles(tmp_path):
    data = tensors()
    save_file(data, folder(tmp_path) / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert_same(open_checkpoint(tmp_path, allow_pickle=True), data)


# Writing


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_shards_round_trip(tmp_path, limit):
    data = tensors() | {"strided": torch.zeros(3, 9)[:1, ::9].squeeze(0), "turned": torch.randn(4, 6).t()}
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in data.items()]
    seen = []
    write_shards(folder(tmp_path), entries, data.__getitem__, limit=limit, on_tensor=seen.append)
    assert seen == list(data)
    assert (tmp_path / "model.safetensors").is_file() == (limit == 10**9)
    assert_same(open_checkpoint(tmp_path), data)
    assert sum(map(len, split_shards(entries, limit))) == len(data)


def interrupt(path):
    path.write_text("half written")
    raise KeyboardInterrupt


def test_a_new_folder_is_whole_or_absent(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), new_folder(out) as partial:
        interrupt(partial / "half")
    assert list(tmp_path.iterdir()) == []
    with new_folder(out) as partial:
        (partial / "file").write_text("new")
        assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="--force"), new_folder(out):
        pass
    with new_folder(out, force=True) as partial:
        (partial / "other").write_text("newer")
        assert (out / "file").read_text() == "new"
    assert [path.name for path in out.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="free space"), new_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "~nobody-of-this-name/model", "a" * 300, "x/" * 3000 + "y"])
def test_names_that_are_no_path_are_refused_without_a_traceback(name):
    rejects(name, name[:100], "give a")

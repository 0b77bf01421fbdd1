"""Every way of damaging a safetensors file gives a CheckpointError that names the file, and never another exception."""

import json
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from qengine.checkpoint import open_checkpoint
from qengine.checkpoint.safetensors_file import read_header
from qengine.errors import CheckpointError

DATA = {"layer.weight": torch.randn(4, 6), "layer.bias": torch.randn(4).half(), "ids": torch.arange(5)}
GOOD = save(DATA, metadata={"format": "pt"})
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]


def opened(path, raw):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(raw)
    return open_checkpoint(path)


def rejects(path, raw, *words):
    with pytest.raises(CheckpointError) as caught:
        opened(path, raw)
    assert "model.safetensors" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def made(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_the_good_file_is_good(tmp_path):
    checkpoint = opened(tmp_path, GOOD)
    for name, tensor in DATA.items():
        assert torch.equal(checkpoint.tensors.load(name), tensor)


@pytest.mark.parametrize("size", sorted({0, 1, 7, 8, 9, 20, HEADER_END - 1, HEADER_END, HEADER_END + 1, len(GOOD) - 1}))
def test_truncated(tmp_path, size):
    rejects(tmp_path, GOOD[:size], "again")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ["empty"]),
        (b"\0" * 64, ["header is 0 bytes"]),
        (struct.pack("<Q", 1 << 60) + b"{}", ["claims a header of"]),
        (struct.pack("<Q", 200_000_000) + b"{}", ["claims a header of"]),
        (struct.pack("<Q", 50) + b"{}", ["truncated inside the header"]),
        (b"<!DOCTYPE html><html><body>404</body></html>", ["HTML page"]),
        (b"\n<html>login</html>", ["HTML page"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", ["git-lfs pointer", "git lfs pull"]),
        (b"PK\x03\x04" + b"\0" * 40, ["pickle or zip"]),
        (b"\x80\x02}q\x00.", ["Python pickle"]),
        (b"GGUF\x03\0\0\0", ["GGUF"]),
        (made(b"not json at all"), ["not valid JSON"]),
        (made(b"\xff\xfe\xfd{}"), ["not valid JSON"]),
        (made(b"[" * 50_000), ["not valid JSON"]),
        (made(b"[1, 2]"), ["expected an object"]),
        (made(b'{"a": {}, "a": {}}'), ["occurs twice"]),
        (made({"__metadata__": [1]}), ["__metadata__"]),
        (made({"__metadata__": {"a": 1}}), ["__metadata__"]),
        (made({"x": 5}), ["'x'", "lacks dtype"]),
        (made({"x": {"dtype": "F32"}}), ["'x'", "lacks dtype"]),
        (made({"x": entry(dtype="F12")}, b"\0" * 8), ["'x'", "unknown dtype 'F12'", "BF16"]),
        (made({"x": entry(dtype=["F32"])}, b"\0" * 8), ["'x'", "unknown dtype"]),
        (made({"x": entry(shape=(-2,))}, b"\0" * 8), ["'x'", "list of sizes"]),
        (made({"x": entry(shape=(True, 2))}, b"\0" * 8), ["'x'", "list of sizes"]),
        (made({"x": entry(shape=("2",))}, b"\0" * 8), ["'x'", "list of sizes"]),
        (made({"x": {**entry(), "shape": 2}}, b"\0" * 8), ["'x'", "list of sizes"]),
        (made({"x": entry(shape=(0, 2**61, 8), offsets=(0, 0))}), ["'x'", "larger than any memory"]),
        (made({"x": entry(shape=(3,))}, b"\0" * 8), ["'x'", "takes 12 bytes", "span 8"]),
        (made({"x": entry(offsets=(8, 0))}, b"\0" * 8), ["'x'", "before it begins"]),
        (made({"x": entry(offsets=(0, 8, 9))}, b"\0" * 8), ["'x'", "two byte positions"]),
        (made({"x": entry(offsets=(-8, 0))}, b"\0" * 8), ["'x'", "two byte positions"]),
        (made({"x": entry(offsets=(0.0, 8.0))}, b"\0" * 8), ["'x'", "two byte positions"]),
        (made({"x": entry(offsets=(8, 16))}, b"\0" * 8), ["'x'", "outside the file"]),
        (made({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, b"\0" * 8), ["'x'", "outside the file"]),
        (made({"x": entry(), "y": entry(offsets=(4, 12))}, b"\0" * 12), ["'x'", "'y'", "overlap"]),
        (made({"x": entry(), "y": entry()}, b"\0" * 8), ["overlap"]),
        (made({"x": entry(), "y": entry(offsets=(12, 20))}, b"\0" * 20), ["4 bytes before tensor 'y'"]),
        (made({"x": entry()}, b"\0" * 11), ["3 bytes after the last tensor"]),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path, raw, words):
    rejects(tmp_path, raw, *words)


def test_a_folder_in_place_of_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


def survives(path, raw):
    """Opened and loaded in full, or refused with a CheckpointError."""
    with suppress(CheckpointError):
        checkpoint = opened(path, raw)
        for name in checkpoint.tensors:
            checkpoint.tensors.load(name).sum()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_header_bytes(tmp_path_factory, changes):
    raw = bytearray(GOOD)
    for position, value in changes:
        raw[position] = value
    survives(tmp_path_factory.getbasetemp() / "fuzz", bytes(raw))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(GOOD)))
def test_any_truncation(tmp_path_factory, size):
    survives(tmp_path_factory.getbasetemp() / "fuzz", GOOD[:size])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8", "BOOL", "C64"]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3), st.binary(max_size=40))
def test_any_header(tmp_path_factory, header, data):
    survives(tmp_path_factory.getbasetemp() / "fuzz", made(header, data))


@pytest.mark.parametrize("length", [640, 0x8B1F, 0x28020, 0x2800A])
def test_a_header_length_that_looks_like_another_files_mark_is_only_a_length(tmp_path, length):
    """640 begins with a pickle's two bytes, 0x8b1f with gzip's; spaces were skipped before looking."""
    text = GOOD[8:HEADER_END].rstrip()
    raw = struct.pack("<Q", length) + text.ljust(length) + GOOD[HEADER_END:]
    checkpoint = opened(tmp_path, raw)
    assert torch.equal(checkpoint.tensors.load("layer.weight"), DATA["layer.weight"])

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tiny_convert import convertible, quick_convert

from qengine.convert.writer import FolderWriter
from qengine.errors import CapacityError, ConfigError


def test_nothing_appears_before_the_commit(tmp_path):
    with FolderWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(3))
        writer.add_json("tokenizer.json", {})
        assert not (tmp_path / "out").exists()
        assert not (writer.folder / "config.json").exists()
        writer.commit({"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_errors_and_interrupts_clean_up(tmp_path, error):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")

    def interrupted():
        with FolderWriter(tmp_path / "out", force=True) as writer:
            writer.add("a", torch.ones(3))
            raise error

    with pytest.raises(error):
        interrupted()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["precious"]


def test_existing_folder_needs_force(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with FolderWriter(out) as writer:  # empty: fine
        writer.commit({})
    with pytest.raises(ConfigError, match=r"not empty.*--force"):
        FolderWriter(out).__enter__()
    (out / "old").write_text("")
    with FolderWriter(out, force=True) as writer:
        writer.commit({"new": True})
    assert os.listdir(out) == ["config.json"]
    assert os.listdir(tmp_path) == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        FolderWriter(tmp_path / "file", force=True).__enter__()


def test_full_disk_is_said_and_cleaned_up(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qengine.convert.writer.write_shard", full)

    def write():
        with FolderWriter(tmp_path / "out") as writer:
            writer.add("a", torch.ones(3))
            writer.commit({})

    with pytest.raises(CapacityError, match="disk is full"):
        write()
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_said_at_once(tmp_path, text_file, monkeypatch):
    _, folder = convertible()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CapacityError, match=r"needs about 0\.04 GB"):
        quick_convert(folder, tmp_path / "out", text_file)
    assert os.listdir(tmp_path) == []


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from qengine.convert.run import convert_checkpoint

def progress(done, total):
    if done == 2:
        print("half", flush=True)
        time.sleep(60)

convert_checkpoint(sys.argv[2], sys.argv[3], method="rtn", group_size=32, shard_bytes=20_000, progress=progress)
"""


def test_killed_halfway_leaves_nothing_that_looks_whole(tmp_path, text_file):
    _, folder = convertible()
    out = tmp_path / "out"
    root = str(__import__("qengine").__path__[0]).removesuffix("/qengine")
    process = subprocess.Popen([sys.executable, "-c", KILLED, root, folder, out], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "half"
    with pytest.raises(ConfigError, match="another conversion is writing it"):
        quick_convert(folder, out, text_file, method="rtn")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.partial"
    assert list(left.glob("*.safetensors"))
    assert not (left / "config.json").exists()
    assert not (left / "model.safetensors.index.json").exists()
    quick_convert(folder, out, text_file, method="rtn")
    assert os.listdir(tmp_path) == ["out"]


def test_interrupted_from_the_keyboard(tmp_path):
    _, folder = convertible()
    root = str(__import__("qengine").__path__[0]).removesuffix("/qengine")
    command = [sys.executable, "-c", KILLED, root, folder, tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "half"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert "KeyboardInterrupt" in errors
    assert os.listdir(tmp_path) == [".out.partial"]


@pytest.mark.parametrize("place", ["folder", "parent", "link"])
def test_the_source_is_never_replaced(tmp_path, text_file, place):
    _, made = convertible()
    folder = tmp_path / "models" / "source"
    shutil.copytree(made, folder)
    (tmp_path / "link").symlink_to(folder)
    before = sorted(os.listdir(folder))
    out = {"folder": folder, "parent": folder.parent, "link": tmp_path / "link"}[place]
    with pytest.raises(ConfigError, match=r"the checkpoint itself; write to another folder"):
        quick_convert(folder, out, text_file, method="rtn", force=True)
    assert sorted(os.listdir(folder)) == before

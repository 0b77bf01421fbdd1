"""The hidden folder of a conversion: one process at a time, and what a killed one leaves behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from qengine.errors import ConfigError


class FolderLock:
    """Makes `folder` if it is not there and holds a lock in it; the lock goes with the process.

    Raises ConfigError that names `target` if another living process holds it.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.path = folder / ".lock"
        folder.mkdir(exist_ok=True)
        self._handle: int | None = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ConfigError(f"--out {target}: another conversion is writing it; wait, or choose another") from error

    def clear(self) -> None:
        """Remove everything in the folder but the lock."""
        for entry in self.folder.iterdir():
            if entry == self.path:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def release(self) -> None:
        """Let another process in."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def restore_replaced(target: Path) -> None:
    """Undo a replacement that was cut off between its two renames, or finish removing what it replaced."""
    old = target.parent / f".{target.name}.replaced"
    if not old.is_dir():
        return
    if target.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, target)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there already; it is always whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

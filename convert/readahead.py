"""Asks the system to have a layer's bytes in its page cache before they are wanted."""

from __future__ import annotations

import os

from qengine.checkpoint import Checkpoint


def read_ahead(checkpoint: Checkpoint, prefix: str) -> int:
    """Announce the tensors whose names begin with `prefix`; returns their bytes, 0 where a system has no such call.

    The pages belong to the system, not to this process, until the layer is read.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    wanted = [info for name, info in checkpoint.tensors.items() if name.startswith(prefix)]
    for path in {info.file for info in wanted}:
        handle = os.open(path, os.O_RDONLY)
        try:
            for info in wanted:
                if info.file == path:
                    os.posix_fadvise(handle, info.offset, info.nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)
    return sum(info.nbytes for info in wanted)

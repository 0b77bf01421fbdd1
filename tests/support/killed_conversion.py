"""Converts a model, killed again and again at random moments, each time taken up; then once to the end.

    python killed_conversion.py FOLDER OUT TEXT KILLS SEED METHOD

Children are forked from a process that has imported everything and computed nothing, so each takes little time. Prints
the parts finished at each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import transformers  # noqa: F401

from qengine.convert.run import convert_checkpoint
from qengine.convert.writer import STATE

LAYERS = 8
LAYER_SECONDS = 0.15


def convert(folder, out, text, method):
    convert_checkpoint(
        folder,
        out,
        calibration=text,
        method=method,
        samples=4,
        seq_len=48,
        group_size=32,
        shard_bytes=60_000,
        resume=True,
    )


def finished(state: Path) -> int:
    """Parts that would be taken up."""
    return json.loads(state.read_text())["finished"] if state.is_file() else 0


def child(*arguments) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            convert(*arguments)
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
    return pid


def main() -> None:
    folder, out, text, kills, seed, method = sys.argv[1:]
    torch.set_num_threads(1)
    state = Path(out).parent / f".{Path(out).name}.partial" / STATE
    rng = random.Random(int(seed))
    if os.waitpid(child(folder, f"{out}-whole", text, method), 0)[1]:
        raise SystemExit("the unbroken conversion failed")
    seen = []
    for target in sorted(rng.randint(0, LAYERS - 2) for _ in range(int(kills))):
        pid = child(folder, out, text, method)
        while finished(state) < target:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, LAYER_SECONDS))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if Path(out).exists():  # a slow moment of the machine let it end first
            break
        seen.append(finished(state))
    print(json.dumps(seen), flush=True)
    if not Path(out).exists() and os.waitpid(child(folder, out, text, method), 0)[1]:
        raise SystemExit("the last conversion failed")


if __name__ == "__main__":
    main()

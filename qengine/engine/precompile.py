"""Kernels compiled beside loading: those of the first steps are found by a dry run as soon as a layer is there.

While the other layers load, worker processes fill Triton's cache folder, where the engine's launches then find them. A
launch whose kernel is being compiled waits for it; one whose kernel nobody has begun compiles it itself. So a kernel
that the dry run misses, or that fails in a worker, costs time and nothing else: it is compiled, and raises, where it is
launched.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import triton

from qengine.engine.compile_client import CompileClient
from qengine.engine.launch_recorder import KernelSpec, Key, compiling, recorded_launches
from qengine.engine.memory import available_cpu_bytes
from qengine.kernels import turing
from qengine.kernels.fused.card import capability
from qengine.models import Decoder
from qengine.models.decoder import DecoderLayer

logger = logging.getLogger(__name__)
WORKER_BYTES = 3 << 28
"""CPU memory that a worker may take: LLVM on the largest kernels."""
MEMORY_SHARE = 0.5
MOST_WORKERS = 16

DrySteps = Callable[[Decoder], Iterator[Callable[[], object]]]
"""Gives steps of a DryRunner over the model, to be called within recorded_launches."""


def count_workers(setting: int | str, free_bytes: int | None = None) -> int:
    """Workers that `compile_workers` asks for; 0 compiles nothing ahead.

    "auto": one a processor that this process may use, as many as fit half of the free CPU memory, at most 16.
    """
    if isinstance(setting, int):
        return setting
    free = available_cpu_bytes() if free_bytes is None else free_bytes
    return max(0, min(processors(), int(free * MEMORY_SHARE) // WORKER_BYTES, MOST_WORKERS))


def processors() -> int:
    """Processors that this process may use, by its affinity and by its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


class Precompiler:
    """Give `watch` the model after each layer that is loaded; close it when the engine ends.

    first, later: steps whose kernels are compiled, the more urgent first. Where Triton's cache folder has all of
    `first`, it is taken to have the rest too.
    """

    def __init__(self, workers: int, device: torch.device, first: DrySteps, later: DrySteps) -> None:
        self._device = device
        self._steps = (first, later)
        self._kinds: set[Any] = set()
        self._seen: list[Decoder] = []
        turing.ensure(capability(device))  # it is part of what Triton tells specializations apart by
        self._client = CompileClient(workers, turing.installed())
        self._patches = ExitStack()
        self._patches.enter_context(compiling(self._client.await_kernel))
        self._thread: threading.Thread | None = None
        self.recorded: dict[Key, KernelSpec] = {}
        self.missing = 0
        self._closed = False
        atexit.register(self.close)  # a thread that is in torch when the interpreter goes would abort the process
        self._empty = not _cache_has_files()
        if self._empty:
            self._client.start()
        # a digest of all of Triton's files: a second or so, without which no kernel is found in the cache
        self._digest = threading.Thread(target=triton.runtime.cache.triton_key, daemon=True)
        self._digest.start()

    def watch(self, model: Decoder) -> None:
        """Compile what the newest of the model's layers needs, if none like it was seen."""
        layer = model.layers[-1]
        kind = layer_kind(layer)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        layers = [layer] * min(2, model.spec.num_layers)  # the last one of a model computes fewer rows than the others
        alone = Decoder(model.spec, model.dtype, model.device, model.embedding, layers, model.norm, model.head)
        self._add(alone, self._steps[0])
        self._seen.append(alone)

    def loaded(self) -> None:
        """The engine is ready: go on with what is less urgent, beside it."""
        models = list(self._seen)
        self._seen.clear()
        if not self.missing:
            self._client.seal()
        else:
            self._thread = threading.Thread(target=self._add_later, args=(models,), daemon=True, name="qengine-dry-run")
            self._thread.start()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for all kernels: whether they are there within `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._client.finish(timeout)

    def close(self) -> None:
        """End the workers, whatever they have not done. A second call does nothing."""
        self._closed = True
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join()
        self._client.close()
        self._patches.close()

    def _look_up(self, specs: dict[Key, KernelSpec]) -> dict[Key, KernelSpec]:
        """Those that Triton's cache folder lacks."""
        self._digest.join()
        return {key: spec for key, spec in specs.items() if not spec.is_cached()}

    def _add_later(self, models: list[Decoder]) -> None:
        for model in models:
            self._add(model, self._steps[1])
        self._client.seal()

    def _add(self, model: Decoder, steps: DrySteps) -> None:
        try:
            with recorded_launches(self._device) as found:
                for run in steps(model):
                    if self._closed:
                        return
                    run()
            new = {key: spec for key, spec in found.items() if key not in self.recorded}
            self.recorded.update(new)
            missing = new if self._empty else self._look_up(new)
            self.missing += len(missing)
            self._client.add(missing)
        except Exception as error:  # a version of torch or Triton that does it differently
            logger.warning("kernels cannot be compiled ahead (%s: %s); each is compiled when first used",
                           type(error).__name__, error)  # fmt: skip


def layer_kind(layer: DecoderLayer) -> Any:
    """What the launches of a layer depend on: equal for layers that launch the same."""
    linears = tuple(
        (name, linear.shape, linear.describe(), linear.nbytes()) for name, linear in layer.linears().items()
    )
    shape = layer.attention.shape
    norm = None if shape.head_norm is None else (shape.head_norm.kind, shape.head_norm.weight.shape)
    attention = (shape.heads, shape.kv_heads, shape.head_dim, shape.softcap, shape.sliding_window, norm)
    rope = None if layer.rope is None else repr(layer.rope.spec)
    return linears, attention, rope, tuple(type(item).__name__ for item in layer.norms)


def _cache_has_files() -> bool:
    """Whether Triton's cache folder has anything: if not, every kernel has to be compiled."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        return any(folder.iterdir())
    return False

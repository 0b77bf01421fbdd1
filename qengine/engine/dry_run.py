"""Steps of a GpuRunner without a device: each chooses and launches what it would, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qengine.engine.block_manager import Copy
from qengine.engine.cuda_graphs import StepGraphs
from qengine.engine.device_inputs import DeviceInputs, InputShape
from qengine.engine.gpu_runner import GpuRunner, LaunchedStep
from qengine.engine.sampler_gpu import Batch, Drawn, GpuSampler
from qengine.engine.step import NO_SWAP, StepItem
from qengine.engine.swap_orders import SwapOrders


class _DrySampler(GpuSampler):
    """Launches the kernels; no parameters are moved and no tokens come back."""

    def fetch(self, logits: torch.Tensor, batch: Batch) -> Drawn:
        """Nothing to fetch."""
        return Drawn(batch, batch.out, None, None, None, self.vocab_size)

    def _upload(
        self, table: np.ndarray, ruled: list[int], lines: list[tuple[int, int]], entries: np.ndarray, count: int
    ) -> None:
        pass


class _DryStaging:
    """Inputs of a step's shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stage(
        self, items: list[StepItem], shape: InputShape, unknown: dict[int, int], target: torch.Tensor | None = None
    ) -> DeviceInputs:
        """As InputStaging.stage, but for the numbers."""
        if target is None:
            target = torch.empty(shape.offsets()[-1], dtype=torch.uint8, device=self._device)
        return DeviceInputs.over(target, shape)


class _DryGraphs(StepGraphs):
    """A replay is the computation that would have been captured."""

    def __init__(self, forward: Callable[[DeviceInputs], torch.Tensor], largest: InputShape, device: torch.device):
        self._forward = forward
        self._buffer = torch.empty(largest.offsets()[-1], dtype=torch.uint8, device=device)

    def replay(self, shape: InputShape) -> torch.Tensor:
        """As StepGraphs.replay."""
        return self._forward(DeviceInputs.over(self._buffer, shape)).contiguous()


class DryRunner(GpuRunner):
    """To be made and run within `recorded_launches`, with GpuRunner's arguments; tokens mean nothing."""

    def __init__(self, *args: Any, graphs: bool, stream: torch.cuda.Stream, **named: Any) -> None:
        super().__init__(*args, graphs=False, stream=stream, **named)
        device = self.model.device
        self._staging = _DryStaging(device)  # type: ignore[assignment]
        self._sampler = _DrySampler(self._sampler.max_rows, self._vocab_size, device)
        if graphs:
            self._graphs = (
                _DryGraphs(self._decode, self._decode_shapes.largest, device),
                _DryGraphs(self._mixed, self._mixed_shapes.largest, device),
            )

    @torch.inference_mode()
    def launch(
        self, items: list[StepItem], copies: list[Copy], swap: SwapOrders = NO_SWAP, *, later: bool = False
    ) -> LaunchedStep:
        """As GpuRunner.launch, for items whose single tokens come first; there is nothing to copy."""
        logits = self._replay(items)
        if logits is None:
            logits, _ = self._eager(items)
        drawn = self._draw(items, logits)
        return LaunchedStep(lambda: drawn, items, list(range(len(items))))

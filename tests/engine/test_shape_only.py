"""Tensors without memory: shapes as torch makes them, addresses as the allocator would give them, nothing computed."""

import pytest
import torch
from ghost_card import DEVICE, ghost_card

from qengine.engine.shape_only import BASE, ShapeOnly, shapes_only


@pytest.fixture(autouse=True)
def card(monkeypatch):
    with ghost_card(monkeypatch, 80):
        yield


def test_operations_give_shapes_strides_and_addresses():
    with shapes_only(DEVICE), torch.inference_mode():
        x = torch.empty(6, 8, dtype=torch.float16, device=DEVICE)
        y = x[2:4].t()
        z = (x @ x.t()).float()
        same = x.add_(1)
        narrow = x.view(torch.int32)
    assert (x.device, x.is_cuda, type(x)) == (DEVICE, True, ShapeOnly)
    assert (tuple(y.shape), y.stride(), y.data_ptr() - BASE) == ((8, 2), (1, 8), 2 * 8 * 2)
    assert (tuple(z.shape), z.dtype) == ((6, 6), torch.float32)
    assert same is x
    assert (tuple(narrow.shape), narrow.dtype) == ((6, 4), torch.int32)
    assert x.data_ptr() % 512 == 0


def test_what_happens_on_the_cpu_is_computed():
    with shapes_only(DEVICE):
        total = torch.arange(4).sum()
        moved = torch.arange(4).to(DEVICE)
    assert int(total) == 6
    assert isinstance(moved, ShapeOnly)
    assert moved.shape == (4,)


def test_numbers_that_are_not_there_cannot_be_read():
    with shapes_only(DEVICE):
        x = torch.empty(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="no memory"):
            x.cpu()
        with pytest.raises(RuntimeError):
            x.sum().item()
    with pytest.raises(RuntimeError, match="no memory"):
        x + 1

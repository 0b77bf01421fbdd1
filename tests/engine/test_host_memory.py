"""Memory that a thread touches while something else goes on."""

import os

import psutil
import pytest
import torch

from qengine.engine.host_memory import PAGE, PIECE, TouchedMemory


def test_all_pages_are_there_when_it_is_taken():
    block = 3 * PAGE * 1000
    count = 2 * PIECE // block + 1
    before = psutil.Process(os.getpid()).memory_info().rss
    touched = TouchedMemory(count, block)
    memory = touched.take()
    grown = psutil.Process(os.getpid()).memory_info().rss - before
    assert memory.shape == (count * block,)
    assert memory.dtype == torch.uint8
    assert grown > 0.95 * count * block
    with pytest.raises(AssertionError, match="before"):
        touched.take()
    touched.close()
    assert memory[-1] == 0, "what was taken stays"


def test_closing_stops_and_gives_back():
    before = psutil.Process(os.getpid()).memory_info().rss
    touched = TouchedMemory(64, PIECE)
    touched.close()
    touched.close()
    assert psutil.Process(os.getpid()).memory_info().rss - before < 64 * PIECE / 2
    with pytest.raises(AssertionError):
        touched.take()

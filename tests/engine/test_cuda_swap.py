"""How copies between a pool and CPU memory are cut to the size of the buffer between them: plain arithmetic."""

import random

import pytest
import torch

from qengine.engine import cuda_swap
from qengine.engine.cuda_swap import buffered_pieces, cut, runs


def test_runs_of_consecutive_numbers():
    assert list(runs([])) == []
    assert list(runs([4])) == [(0, 1)]
    assert list(runs([1, 2, 3, 7, 9, 10])) == [(0, 3), (3, 4), (4, 6)]


def test_buffer_holds_whole_blocks_or_some_layers_of_one():
    assert buffered_pieces(32, 1 << 18) == 128
    assert buffered_pieces(28, 16400) == (32 << 20) // (28 * 16400) * 28
    assert buffered_pieces(40, 5 << 20) == 6, "a block is larger: some of its layers"
    assert buffered_pieces(2, 100 << 20) == 1, "a layer of a block is larger: one of them"


@pytest.mark.parametrize("size", [1, 40, 41, 199, 200, 1000, 10**6])
def test_every_byte_has_its_place(size, monkeypatch):
    """The device's twin: gather parts into a buffer of any size, and move its pieces to CPU memory."""
    monkeypatch.setattr(cuda_swap, "STAGING_BYTES", size)
    rng, layers, piece = random.Random(size), 5, 40
    pool = torch.randint(0, 256, (layers, 9, piece), dtype=torch.uint8)
    host = torch.full((12, layers, piece), 7, dtype=torch.uint8)
    pairs = sorted(zip(rng.sample(range(12), 6), rng.sample(range(9), 6), strict=True))
    pieces = buffered_pieces(layers, piece)
    assert pieces * piece <= max(size, piece)
    staging = torch.empty(pieces, piece, dtype=torch.uint8)
    for start, moves in cut([cpu for cpu, _ in pairs], layers, pieces):
        staged, ids = moves.buffer(staging), [block for _, block in pairs[start : start + len(moves.cpu_blocks)]]
        staged.copy_(pool[moves.first_layer : moves.first_layer + moves.num_layers, ids].transpose(0, 1))
        for buffer, place in moves.between(staged, host):
            assert buffer.is_contiguous()
            assert place.is_contiguous()
            place.copy_(buffer)
    want = torch.full_like(host, 7)
    for cpu, block in pairs:
        want[cpu] = pool[:, block]
    assert torch.equal(host, want)

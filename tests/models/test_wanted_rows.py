"""Where only some tokens' hidden states are wanted, the last layer computes these and keeps keys and values of all."""

import pytest
import torch
from tiny_models import PagedRun, load, tiny

from qengine.layers.attention import DenseContext, PagedBatch, PagedContext


@pytest.mark.parametrize("family", ["llama1", "gemma2", "olmo2", "stablelm-12b"])
def test_wanted_rows_are_those_of_all_tokens(family):
    model = load(tiny(family)[1])
    ids = torch.randint(3, 96, (12,))
    with torch.no_grad():
        full = model.forward(ids, torch.arange(12), DenseContext(1, 12))
        rows = torch.tensor([11, 0, 5])
        some = model.forward(ids, torch.arange(12), DenseContext(1, 12), rows)
    assert some.shape == (3, full.shape[1])
    assert (some - full[rows]).abs().max() < 1e-5


def test_the_cache_holds_tokens_that_are_not_wanted():
    model = load(tiny("llama1")[1])
    ids = torch.randint(3, 96, (9,))
    expected = PagedRun(model, [9]).step({0: ids})[0][-1]
    run = PagedRun(model, [9])
    slots = torch.tensor([run._slot(0, p) for p in range(8)])
    batch = PagedBatch([8], [0], torch.tensor([run.tables[0]], dtype=torch.int32), slots, None)
    with torch.no_grad():
        model.forward(ids[:8], torch.arange(8), PagedContext(run.cache, batch), torch.tensor([0]))
    run.cached[0] = 8
    assert (run.step({0: ids[8:]})[0][0] - expected).abs().max() < 1e-4

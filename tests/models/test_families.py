"""Every family's logits against transformers', in float32: a prompt, and decoding through a paged cache."""

import pytest
import torch
from tiny_models import FAMILIES, PagedRun, dense_logits, load, reference_logits, tiny

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request):
    reference, folder = tiny(request.param)
    return reference, load(folder)


def _close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() < TOLERANCE
    assert theirs.abs().max() > 0.5  # logits that do not vary would agree with anything


def test_prompt(pair):
    reference, model = pair
    ids = torch.randint(3, 96, (23,))
    _close(dense_logits(model, ids), reference_logits(reference, ids))


def test_paged_prefill_in_chunks_and_decode_of_different_lengths(pair):
    reference, model = pair
    lengths = [29, 11, 19, 5]
    texts = [torch.randint(3, 96, (n,)) for n in lengths]
    expected = [reference_logits(reference, text) for text in texts]
    run = PagedRun(model, lengths)
    # Chunks and single tokens in the same steps; sequence 3 joins late.
    cuts = [
        {0: 13, 1: 3},
        {0: 5, 1: 1, 2: 9},
        {0: 1, 1: 1, 2: 2, 3: 1},
        {3: 2, 0: 1, 2: 1},
        *[{0: 1, 1: 1, 2: 1}] * 3,
        {0: 6, 1: 3, 2: 4, 3: 2},
    ]
    for cut in cuts:
        parts = {row: texts[row][run.cached[row] : run.cached[row] + count] for row, count in cut.items()}
        before = list(run.cached)
        for row, logits in run.step(parts).items():
            _close(logits, expected[row][before[row] : before[row] + len(parts[row])])
    assert run.cached == lengths


def test_decode_steps_match_transformers_generating(pair):
    reference, model = pair
    ids = torch.randint(3, 96, (2, 12))
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=7,
        min_new_tokens=7,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    run = PagedRun(model, [19, 19], block_size=16)
    for step, expected in enumerate(out.logits):
        first = 0 if step == 0 else 11 + step
        got = run.step({row: out.sequences[row, first : 12 + step] for row in (0, 1)})
        _close(torch.stack([got[0][-1], got[1][-1]]), expected.float())

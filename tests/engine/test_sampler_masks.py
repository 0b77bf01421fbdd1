"""Masks of grammars in the samplers: the distribution is the softmax over what is allowed; bans are folded in."""

import math

import pytest
import sampling_cases as cases
import torch
from fixed_mask import FixedMask, random_mask, with_mask
from sampling_cases import OPTIONS, row

from qengine.engine import sampler
from qengine.engine.logit_rules import apply_rules
from qengine.engine.sampler_gpu import GpuSampler
from qengine.engine.token_masks import fill_masks
from qengine.structured.matcher import has_tokens

VOCAB = 75


def masks_of(*rows):
    import numpy as np

    lines = np.zeros((len(rows), 3), dtype=np.int32)
    fill_masks(rows, lines)
    return [{token for token, yes in enumerate(has_tokens(line, range(VOCAB))) if yes} for line in lines]


def test_the_draw_is_from_the_masked_softmax():
    count, ids = 4000, {3, 31, 32, 33, 64, 74}
    logits = torch.randn(1, VOCAB + 5, generator=torch.Generator().manual_seed(1)) * 2
    logits[0, VOCAB:] = 50.0
    rows = [with_mask(row({"temperature": 0.7}, seed=seed), FixedMask(ids, VOCAB)) for seed in range(count)]
    tokens = torch.tensor(sampler.sample(logits.expand(count, -1), rows, VOCAB).token_ids)
    forbidden = torch.tensor([token not in ids for token in range(VOCAB)])
    want = (logits[0, :VOCAB].masked_fill(forbidden, -math.inf).double() / 0.7).softmax(0)
    assert cases.chi_square(tokens, want) < 6
    assert cases.chi_square(tokens, (logits[0, :VOCAB].double() / 0.9).softmax(0)) > 6
    torch.testing.assert_close(cases.probabilities(logits[0], rows[0], VOCAB), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["normal", "holes", "tied"])
def test_the_device_samplers_reference_agrees(kind):
    generator = torch.Generator().manual_seed(2)
    rows = [
        with_mask(row(o, seed=i, position=i % 4), random_mask(VOCAB, (0.8, 0.1)[i % 2], generator))
        if i % 3
        else row(o, seed=i)
        for i, o in enumerate(OPTIONS.values())
    ]
    logits = torch.stack([cases.logits_of(kind, VOCAB + 8, generator) for _ in rows])
    logits[:, VOCAB:] = 1e5
    assert cases.complaints(GpuSampler(len(rows), VOCAB, "cpu"), logits, rows) == []


def test_a_mask_is_cut_by_what_else_is_banned_unless_that_leaves_nothing():
    mask = FixedMask({2, 4, 8}, VOCAB)
    plain = with_mask(row({}), mask)
    words = with_mask(row({}, bad_words=((4,), (9, 8))), mask)
    only_words = with_mask(row({}, bad_words=((2,), (4,), (8,))), mask)
    held = with_mask(row({"min_tokens": 3}, position=2, banned_ids=(2, 8)), mask)
    late = with_mask(row({"min_tokens": 3}, position=3, banned_ids=(2, 8)), mask)
    ends = with_mask(row({"min_tokens": 3}, banned_ids=(2, 4, 8)), mask)
    allowed = with_mask(row({"allowed_token_ids": [4, 5]}), mask)
    assert masks_of(plain, words, only_words, held, late, ends, allowed) == [
        {2, 4, 8}, {2, 8}, {2, 4, 8}, {4}, {2, 4, 8}, {2, 4, 8}, {4},
    ]  # fmt: skip
    mask.stop_ids = (8,)
    assert masks_of(allowed) == [{4, 8}], "the end is not held back by allowed_token_ids"


def test_biases_and_penalties_apply_within_the_mask_alone():
    logits = torch.zeros(1, VOCAB)
    one = with_mask(row({"logit_bias": {2: 5.0, 4: 1.0}, "temperature": 0}), FixedMask({4, 6}, VOCAB))
    scores = apply_rules(logits, [one])[0]
    assert scores.isfinite().nonzero()[:, 0].tolist() == [4, 6]
    assert (scores[4], scores[6]) == (1.0, 0.0)
    assert sampler.sample(logits, [one], VOCAB).token_ids == [4]
    assert GpuSampler(1, VOCAB, "cpu").sample(logits, [one]).token_ids == [4]


def test_nothing_allowed_is_not_valid():
    logits = torch.zeros(2, VOCAB)
    rows = [with_mask(row({"logprobs": 1}), FixedMask(set(), VOCAB)), row({})]
    assert sampler.sample(logits, rows, VOCAB).valid == [False, True]
    assert GpuSampler(2, VOCAB, "cpu").sample(logits, rows).valid == [False, True]


def test_a_matcher_is_told_the_output_alone_and_only_what_is_known():
    mask = FixedMask({1}, VOCAB)
    one = with_mask(row({}, position=2), mask)
    sampler.sample(torch.zeros(1, VOCAB), [one], VOCAB)
    assert mask.seen == [one.token_ids[one.num_prompt :]]
    one.token_ids.append(-1)
    with pytest.raises(ValueError, match="grammars"):
        GpuSampler(1, VOCAB, "cpu").prepare([one])


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.arange(VOCAB, dtype=torch.float32)[None] / 10
    one = with_mask(row({"logprobs": 1, "temperature": 0}), FixedMask({5}, VOCAB))
    [item] = sampler.sample(logits, [one], VOCAB).logprobs
    assert item.token_ids == [5, VOCAB - 1]
    assert item.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 5]))

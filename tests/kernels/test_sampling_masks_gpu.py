"""Masks of grammars in the device sampler on a GPU, natively and with TRITON_OVERRIDE_ARCH=sm75."""

import pytest
import sampling_cases as cases
import torch
from fixed_mask import random_mask, with_mask
from sampling_cases import KINDS, OPTIONS, row

from qengine.engine.logit_rules import apply_rules
from qengine.engine.sampler_gpu import GpuSampler
from qengine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGE = 152_064


def masked_rows(vocab, seed, skip=()):
    """A row of each option, with masks of few and of many tokens; every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, (name, options) in enumerate(OPTIONS.items()):
        one = row(options, position=i % 4, seed=i + seed, vocab=min(vocab, 30))
        if i % 5 < 4 and name not in skip:
            mask = random_mask(vocab, (0.9, 0.5, 0.01, 1e-4)[i % 4], generator)
            if options.get("allowed_token_ids"):
                mask.stop_ids = (2,)
            with_mask(one, mask)
        rows.append(one)
    return rows


@pytest.mark.parametrize("vocab", [31, 33, 4096, 20_001, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_masked_rows_draw_what_the_reference_draws(vocab, dtype):
    gpu = GpuSampler(64, vocab, "cuda")
    found = []
    for n, kind in enumerate(KINDS):
        rows = masked_rows(vocab, seed=n)
        generator = torch.Generator().manual_seed(n)
        logits = torch.stack([cases.logits_of(kind, vocab + 64, generator) for _ in rows])
        logits = logits.clamp(-6e4, 6e4) if dtype == torch.float16 else logits
        logits[:, vocab:] = 5e4
        logits[logits == -6e4] = -torch.inf
        found += [f"{kind} {c}" for c in cases.complaints(gpu, logits.to(dtype).cuda(), rows)]
    assert not found, "\n".join(found[:20])


def test_masked_logits_are_the_references_bit_for_bit():
    vocab = 20_001
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(12):
        options = {**OPTIONS["everything"], "min_tokens": 9 * (i % 2)}
        one = row(options, position=i + 1, seed=i, banned_ids=(0, 2, 8), bad_words=((4,), (9, 12)))
        rows.append(with_mask(one, random_mask(vocab, 0.3, generator)))
    logits = torch.randn(12, vocab, generator=generator).cuda()
    gpu = GpuSampler(16, vocab, "cuda")
    gpu.sample(logits, rows)
    assert torch.equal(gpu._changed[:12, :vocab].cpu(), apply_rules(logits.cpu(), rows))


def test_draws_follow_the_masked_softmax():
    vocab, count = LARGE, 8192
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(1, vocab, generator=generator) * 2).cuda()
    mask = random_mask(vocab, 0.02, generator)
    rows = [with_mask(row({"temperature": 0.8}, seed=seed), mask) for seed in range(count)]
    gpu = GpuSampler(256, vocab, "cuda")
    tokens = []
    for start in range(0, count, 256):
        tokens += gpu.sample(logits, rows[start : start + 256], [0] * 256).token_ids
    want = cases.probabilities(logits[0].cpu(), rows[0], vocab)
    assert cases.chi_square(torch.tensor(tokens), want) < 6
    free = cases.probabilities(logits[0].cpu(), row({"temperature": 1.0}), vocab)
    assert cases.chi_square(torch.tensor(tokens), free) > 6


def test_rows_without_a_mask_are_drawn_as_if_alone():
    vocab = LARGE
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(24, vocab, generator=generator) * 3).cuda()
    names = list(OPTIONS)
    make = lambda i: row(OPTIONS[names[i % len(names)]], seed=i, position=i % 3)  # noqa: E731
    rows = [with_mask(make(i), random_mask(vocab, 0.1, generator)) if i % 2 else make(i) for i in range(24)]
    together = GpuSampler(24, vocab, "cuda").sample(logits, rows).token_ids
    alone = [GpuSampler(1, vocab, "cuda").sample(logits[i : i + 1], [make(i)]).token_ids[0] for i in range(0, 24, 2)]
    assert together[::2] == alone


def test_masks_of_other_steps_leave_nothing_behind():
    vocab = 20_001
    generator = torch.Generator().manual_seed(9)
    gpu = GpuSampler(64, vocab, "cuda")
    for step in range(6):
        count = (1, 40, 3, 64, 2, 17)[step]
        logits = torch.randn(count, vocab, generator=generator).cuda()
        masks = [random_mask(vocab, 0.001, generator) for _ in range(count)]
        rows = [with_mask(row({"temperature": i % 2}, seed=i), masks[i]) for i in range(count)]
        for token, mask in zip(gpu.sample(logits, rows).token_ids, masks, strict=True):
            assert (int(mask.words[token // 32]) >> (token % 32)) & 1


def test_a_row_without_any_allowed_token_is_not_valid():
    vocab = 20_001
    mask = random_mask(vocab, 0.5, torch.Generator())
    mask.words = mask.words * 0
    logits = torch.randn(2, vocab, device="cuda")
    samples = GpuSampler(2, vocab, "cuda").sample(logits, [row({}), with_mask(row({"logprobs": 2}), mask)])
    assert samples.valid == [True, False]
    assert SamplingParams().logprobs is None

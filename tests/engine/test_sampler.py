import math

import pytest
import torch

from qengine.engine.sampler import SampleRow, sample, uniform
from qengine.sampling_params import SamplingParams

VOCAB = 12


def row(params, prompt=(), output=(), seed=7, index=0, **more):
    return SampleRow(params, [*prompt, *output], len(prompt), seed, index, **more)


def choose(logits, *rows, vocab=None):
    logits = torch.as_tensor(logits, dtype=torch.float32).reshape(len(rows), -1)
    before = logits.clone()
    samples = sample(logits, list(rows), vocab or logits.shape[1])
    assert torch.equal(logits, before), "the logits must not be changed"
    return samples.token_ids


def draws(logits, params, count, **more):
    """`count` draws at positions 0, 1, ... of one request."""
    logits = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    tokens = [0] * count
    rows = [SampleRow(params, tokens, count - i, 123, **more) for i in range(count)]
    return torch.tensor(sample(logits, rows, logits.shape[1]).token_ids)


def chi_square(tokens, probs):
    """Pearson's statistic in standard deviations above its mean; tokens of probability 0 must not occur."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    probs = torch.as_tensor(probs, dtype=torch.float64)
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was drawn"
    used = probs > 0
    want = probs[used] * len(tokens)
    freedom = int(used.sum()) - 1
    return float((((counts[used] - want) ** 2 / want).sum() - freedom) / math.sqrt(2 * freedom))


LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)).tolist()


def softmax(logits):
    return torch.tensor(logits, dtype=torch.float64).softmax(0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    tokens = draws(LOGITS, SamplingParams(temperature=temperature), 20_000)
    assert chi_square(tokens, softmax([v / temperature for v in LOGITS])) < 5


def test_the_chi_square_test_can_fail():
    tokens = draws(LOGITS, SamplingParams(temperature=1.1), 20_000)
    assert chi_square(tokens, softmax(LOGITS)) > 5


def test_top_k_top_p_and_min_p_cut_and_renormalize():
    probs = softmax(LOGITS)
    order = probs.argsort(descending=True)
    for params, kept in [
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.6), int((probs[order].cumsum(0) < 0.6).sum()) + 1),
        (SamplingParams(min_p=0.3), int((probs >= 0.3 * probs.max()).sum())),
    ]:
        want = torch.zeros(VOCAB, dtype=torch.float64)
        want[order[:kept]] = probs[order[:kept]] / probs[order[:kept]].sum()
        assert 1 < kept < VOCAB
        assert chi_square(draws(LOGITS, params, 20_000), want) < 5


@pytest.mark.parametrize("spread", [6.0, 0.01])
def test_top_p_in_a_large_vocabulary_keeps_the_fewest_tokens_that_reach_it(spread):
    # Peaked: a few tokens reach top_p. Flat: more than the partial sort looks at.
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * spread
    probs = logits.double().softmax(0)
    order = probs.argsort(descending=True)
    count = int((probs[order].cumsum(0) < 0.7).sum()) + 1
    assert (count > 1024) == (spread < 1)
    kept = set(order[:count].tolist())
    drawn = draws(logits.tolist(), SamplingParams(top_p=0.7), 3000).tolist()
    assert set(drawn) <= kept
    assert len(set(drawn)) > min(count, 3000) * 0.3


def test_top_p_is_taken_of_what_top_k_leaves():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of top_k=2 the first has 4/7 of the mass, more than 0.5: it alone is left. Without top_k 0.5 keeps two.
    assert set(draws(logits, SamplingParams(top_k=2, top_p=0.5), 500).tolist()) == {0}
    assert set(draws(logits, SamplingParams(top_p=0.5), 500).tolist()) == {0, 1}


@pytest.mark.parametrize("params", [{"temperature": 0.0001}, {"top_p": 0.0001}, {"top_p": 0}, {"top_k": 1}])
def test_near_greedy_settings_take_the_most_likely_token(params):
    logits = torch.randn(50, 300) * 20
    logits[0] = 0
    logits[0, 5] = 3e4
    rows = [row(SamplingParams(**params), seed=i) for i in range(50)]
    assert choose(logits, *rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 9_999_999])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k):
    tokens = draws(LOGITS, SamplingParams(top_k=top_k), 3000)
    assert torch.equal(tokens, draws(LOGITS, SamplingParams(), 3000))


def test_a_draw_never_depends_on_the_rows_beside_it():
    torch.manual_seed(0)
    logits = torch.randn(40, 2000) * torch.linspace(0.01, 4, 40)[:, None]
    kinds = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 1500, "top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logit_bias": {3: 4.0}},
        {"logprobs": 3},
        {"temperature": 0.3, "bad_words": []},
    ]
    rows = [row(SamplingParams(**kinds[i % 10]), prompt=(1, 2, i), output=(5,) * i, seed=i) for i in range(40)]
    together = sample(logits, rows, 2000).token_ids
    alone = [sample(logits[i : i + 1], [rows[i]], 2000).token_ids[0] for i in range(40)]
    reverse = sample(logits.flip(0), rows[::-1], 2000).token_ids[::-1]
    assert together == alone == reverse


def test_draws_differ_by_seed_index_and_position_and_repeat():
    numbers = {uniform(s, i, p) for s in (0, 1, -1, 2**64 - 1) for i in range(5) for p in range(50)}
    assert len(numbers) == 3 * 5 * 50, "-1 and 2**64-1 are the same 64 bits; all else differs"
    assert all(0 <= n < 1 for n in numbers)
    assert uniform(5, 1, 9) == uniform(5, 1, 9)
    one = [draws(LOGITS, SamplingParams(n=3), 60, index=i).tolist() for i in range(3)]
    assert one[0] != one[1] != one[2]


def test_repetition_penalty_covers_prompt_and_output():
    logits = [2.0, 1.9, -1.0, -1.5, 0.0]
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert choose(logits, row(params)) == [0]
    assert choose(logits, row(params, prompt=[0])) == [1]
    assert choose(logits, row(params, prompt=[0], output=[1])) == [0]  # 1.0 against 0.95
    only = SamplingParams(temperature=0, repetition_penalty=2.0, allowed_token_ids=[2, 3])
    assert choose(logits, row(only, prompt=[2])) == [3]  # a negative logit is multiplied: -2 < -1.5


def test_presence_and_frequency_penalties_cover_the_output_only():
    logits = [2.0, 1.4, 0.0]
    presence = SamplingParams(temperature=0, presence_penalty=0.7)
    frequency = SamplingParams(temperature=0, frequency_penalty=0.25)
    assert choose(logits, row(presence, prompt=[0, 0])) == [0]
    assert choose(logits, row(presence, output=[0])) == [1]
    assert choose(logits, row(frequency, output=[0, 0])) == [0]  # 1.5
    assert choose(logits, row(frequency, output=[0, 0, 0])) == [1]  # 1.25
    attract = SamplingParams(temperature=0, presence_penalty=-2)
    assert choose(logits, row(attract, output=[2])) == [0]
    assert choose([2.0, 1.4, 0.5], row(attract, output=[2])) == [2]


def test_logit_bias_allowed_ids_bad_words_and_min_tokens():
    logits = [3.0, 2.0, 1.0, 0.0]
    assert choose(logits, row(SamplingParams(temperature=0, logit_bias={2: 5}))) == [2]
    assert choose(logits, row(SamplingParams(temperature=0, logit_bias={"0": -100}))) == [1]
    assert choose(logits, row(SamplingParams(temperature=0, allowed_token_ids=[3, 2]))) == [2]
    word = SamplingParams(temperature=0)
    assert choose(logits, row(word, bad_words=((0,),))) == [1]
    assert choose(logits, row(word, output=[1], bad_words=((1, 0),))) == [1]
    assert choose(logits, row(word, prompt=[1], bad_words=((1, 0),))) == [0], "bad words are sought in the output"
    assert choose(logits, row(word, output=[2, 1, 3], bad_words=((1, 0), (1, 3, 0)))) == [1]
    least = SamplingParams(temperature=0, min_tokens=2)
    assert choose(logits, row(least, output=[1], banned_ids=(0,))) == [1]
    assert choose(logits, row(least, output=[1, 1], banned_ids=(0,))) == [0]


def test_bad_words_that_leave_nothing_are_not_applied():
    params = SamplingParams(temperature=1, allowed_token_ids=[2])
    assert choose([3.0, 2.0, 1.0], row(params, bad_words=((2,),))) == [2]


def test_padded_ids_are_never_sampled():
    logits = torch.zeros(3, 10)
    logits[:, 8:] = 50
    rows = [row(SamplingParams(temperature=0)), row(SamplingParams()), row(SamplingParams(top_k=3, logprobs=9))]
    samples = sample(logits, rows, 8)
    assert max(samples.token_ids) < 8
    assert max(samples.logprobs[2].token_ids) < 8


def test_logprobs_are_of_the_raw_distribution_with_ranks():
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={3: 100})
    [item] = sample(torch.tensor([LOGITS]), [row(params)], VOCAB).logprobs
    want = softmax(LOGITS).log()
    order = want.argsort(descending=True).tolist()
    assert item.token_ids == [3, *order[:2]]
    assert item.logprobs == pytest.approx(want[item.token_ids].tolist(), abs=1e-6)
    assert item.ranks == [order.index(3) + 1, 1, 2]


def test_logprobs_zero_and_all_and_none():
    logits = torch.tensor([LOGITS] * 3)
    rows = [row(SamplingParams(logprobs=n)) for n in (0, -1, None)]
    zero, every, none = sample(logits, rows, VOCAB).logprobs
    assert len(zero.token_ids) == 1
    assert len(every.token_ids) == VOCAB + 1
    assert none is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_finite_maximum_is_not_valid(value):
    logits = torch.zeros(2, 6)
    logits[1, 2] = value
    rows = [row(SamplingParams(temperature=t)) for t in (0, 1)]
    assert sample(logits, rows, 6).valid == [True, False]

"""The device sampler's host side, and its reference on the CPU against the CPU sampler."""

import gc

import pytest
import sampling_cases as cases
import torch
from sampling_cases import KINDS, OPTIONS, row

from qengine.engine import sampler
from qengine.engine.row_parameters import RowCache
from qengine.engine.sampler import SampleRow
from qengine.engine.sampler_gpu import GpuSampler
from qengine.engine.token_counts import TokenCounts
from qengine.kernels.fused.sampling import Inputs, Plan, Workspace, sample_rows, token_logprobs
from qengine.kernels.fused.sampling_ref import column
from qengine.sampling_params import SamplingParams

VOCAB = 120
CPU = torch.device("cpu")


def logits_for(kind, count, seed=0, width=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([cases.logits_of(kind, width, generator) for _ in range(count)])


def tables(*rows):
    return RowCache(VOCAB).table(list(rows), list(range(len(rows))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_draws_what_the_cpu_sampler_draws(kind):
    rows = [row(o, seed=i, position=i % 4) for i, o in enumerate(OPTIONS.values())]
    logits = logits_for(kind, len(rows), width=VOCAB + 8)
    logits[:, VOCAB:] = 1e5
    assert cases.complaints(GpuSampler(len(rows), VOCAB, "cpu"), logits, rows) == []


def test_a_wrong_token_and_a_wrong_cut_are_seen():
    logits = logits_for("normal", 1)
    one = row(OPTIONS["all"])
    [token] = sampler.sample(logits, [one], VOCAB).token_ids
    scores = sampler.apply_rules(logits, [one])[0]
    kept = cases.kept(scores, one)
    cut = float(scores[kept].min())
    assert cases.complaint(logits[0], one, VOCAB, token, cut) is None
    others = [int(t) for t in kept.nonzero()[:, 0] if t != token]
    assert all(cases.complaint(logits[0], one, VOCAB, t, cut) for t in others)
    assert cases.complaint(logits[0], one, VOCAB, int((~kept).nonzero()[0]), cut)
    lower = float(scores[~kept].max())
    assert "kept" in str(cases.complaint(logits[0], one, VOCAB, token, lower))


def test_rows_share_logits_and_results_keep_their_order():
    logits = logits_for("peaked", 3)
    rows = [row({"logprobs": i, "n": 2}, seed=i, index=i % 2) for i in range(5)]
    sources = [2, 2, 0, 1, 0]
    mine = GpuSampler(8, VOCAB, "cpu").sample(logits, rows, sources)
    want = sampler.sample(logits[sources], rows, VOCAB)
    assert mine.token_ids == want.token_ids
    for a, b in zip(mine.logprobs, want.logprobs, strict=True):
        assert (a.token_ids, a.ranks) == (b.token_ids, b.ranks)
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-6)


@pytest.mark.parametrize("count", [0, 3, 64, 65, 1000, -1])
def test_logprobs_of_any_length(count):
    logits = logits_for("normal", 4, width=VOCAB + 3)
    gpu = GpuSampler(4, VOCAB, "cpu")
    rows = [row({"logprobs": count}, seed=i) for i in range(4)]
    samples = gpu.sample(logits, rows)
    want = sampler.logprobs_of(logits, samples.token_ids, [count] * 4, VOCAB)
    for found in (samples.logprobs, gpu.logprobs_of(logits, samples.token_ids, [count] * 4)):
        for a, b in zip(found, want, strict=True):
            assert (a.token_ids, a.ranks) == (b.token_ids, b.ranks)
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-6)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ([{"temperature": 0}] * 2, Plan(2)),
        ([{"temperature": 0}, {}], Plan(2, draws=True)),
        ([{"top_k": 5}], Plan(1, plain=False, draws=True, cuts=True)),
        ([{"top_p": 0.5}, {}], Plan(2, draws=True, cuts=True, wide=True)),
        ([{"min_p": 0.1, "top_k": 3}], Plan(1, plain=False, draws=True, cuts=True)),
        ([{"top_k": VOCAB}, {"top_k": -1}], Plan(2, draws=True)),
        ([{"temperature": 0, "top_p": 0.5, "presence_penalty": 1}], Plan(1, counted=True)),
        ([{"temperature": 0, "logit_bias": {1: 1, 2: 2}, "logprobs": 7}], Plan(1, ruled=1, entries=2, lines=1, top=7)),
        ([{"temperature": 0, "logprobs": 65}, {"temperature": 0, "logprobs": -1}], Plan(2)),
    ],
)
def test_plans_hold_what_a_batch_needs(options, plan):
    gpu = GpuSampler(4, VOCAB, "cpu")
    found = gpu.prepare([row(o) for o in options]).plan
    assert found == plan
    assert found.fixed == (not (plan.ruled or plan.counted or plan.lines))


def test_a_padded_batch_skips_the_rows_behind():
    gpu = GpuSampler(8, VOCAB, "cpu")
    logits = logits_for("normal", 8)
    gpu.prepare([row({}) for _ in range(8)])
    batch = gpu.prepare([row({}, seed=i) for i in range(3)], padded=6)
    assert batch.plan.rows == 6
    batch.out.fill_(-9)
    gpu.run(logits, batch)
    assert batch.tokens[3:].tolist() == [-9] * 3
    assert (batch.tokens[:3] >= 0).all()
    assert gpu.fetch(logits, batch).samples().token_ids == batch.tokens[:3].tolist()


def test_the_number_drawn_with_is_the_positions():
    one = row({}, seed=11, position=4, index=2)
    table, _ = tables(one)
    one.token_ids += [8, -1, -1]  # the last two are being sampled
    ahead, _ = tables(one)
    assert table[0, column("UNIFORM")] == sampler.uniform(11, 2, 4)
    assert ahead[0, column("UNIFORM")] == sampler.uniform(11, 2, 7)


def test_entries_are_merged_to_one_a_token():
    one = row(
        {"logit_bias": {4: 1.5, 9: -2}, "allowed_token_ids": [4, 7, 8], "min_tokens": 3, "stop_token_ids": [7]},
        banned_ids=(7,),
        bad_words=((8,), (4, 9)),
    )
    table, entries = tables(row({}), one, one)
    assert sorted(map(tuple, entries[:4].tolist())) == [(4, 1.5, 1), (7, 0, 1 | 4), (8, 0, 1 | 2), (9, -2, 0)]
    assert table[:, column("FIRST")].tolist() == [0, 0, 4]
    assert table[:, column("CHANGED")].tolist() == [-1, 0, 0]
    assert table[1, column("BAD")] == 1
    one.token_ids += [1, 2, 4]
    _, later = tables(one)
    assert sorted(map(tuple, later.tolist())) == [(4, 1.5, 1), (7, 0, 1), (8, 0, 1 | 2), (9, -2, 2)]


def test_a_rows_numbers_are_forgotten_with_it():
    cache = RowCache(VOCAB)
    rows = [row({}, seed=i) for i in range(5)]
    cache.table(rows, [0] * 5)
    assert len(cache._known) == 5
    del rows
    gc.collect()
    assert not cache._known


def counted(counts, one, place):
    line = counts.table[place].int()
    output = torch.bincount(torch.tensor(one.token_ids[one.num_prompt :], dtype=torch.int64), minlength=VOCAB)
    assert torch.equal((line & 32767)[:VOCAB], output[:VOCAB].int())
    assert (line < 0).nonzero()[:, 0].tolist() == sorted({t for t in one.token_ids[: one.num_prompt] if t < VOCAB})


def test_counts_are_made_kept_and_made_anew():
    counts = TokenCounts(VOCAB, CPU)
    rows = [row({}, seed=i, position=i) for i in range(5)]
    rows[2].token_ids[0] = VOCAB + 5  # a prompt may hold ids that are never sampled
    places = [counts.place(one) for one in rows]
    assert len(set(places)) == 5
    for one, place in zip(rows, places, strict=True):
        counted(counts, one, place)
    # a step: the kernel counts the token, the engine appends it
    counts.table[places[0], 33] += 1
    rows[0].token_ids.append(33)
    counts.table[places[0], 50] = 7
    assert counts.place(rows[0]) == places[0]
    assert counts.table[places[0], 50] == 7, "counts in step with the list are not made anew"
    # a step that failed: nothing was appended, so all is counted again
    assert counts.place(rows[0]) == places[0]
    counted(counts, rows[0], places[0])
    counts.forget(rows[1])
    counts.table[places[1]] = 3
    rows[1].token_ids.append(5)
    counted(counts, rows[1], counts.place(rows[1]))


def test_counts_of_finished_sequences_are_used_again():
    counts = TokenCounts(VOCAB, CPU)
    rows = [row({}, seed=i) for i in range(4)]
    places = {counts.place(one) for one in rows}
    held = counts.table.shape[0]
    del rows
    gc.collect()
    others = [row({}, seed=i, position=3) for i in range(4)]
    assert {counts.place(one) for one in others} == places
    assert counts.table.shape[0] == held
    for one in others:
        counted(counts, one, counts._places[id(one)].place)


def test_tokens_not_known_yet_are_counted_by_the_device_alone():
    counts = TokenCounts(VOCAB, CPU)
    one = row({})
    place = counts.place(one)
    for _ in range(2):  # two steps are put together before the first one's token is known
        one.token_ids.append(-1)
        assert counts.place(one) == place
    one.token_ids[-2:] = [1, 2]
    one.token_ids.append(-1)
    assert counts.place(one) == place
    counts.forget(one)
    with pytest.raises(ValueError, match="tokens that are known"):
        counts.place(one)
    with pytest.raises(ValueError, match="tokens that are known"):
        counts.place(SampleRow(SamplingParams(), [1, -1], 1, 3))


def test_penalties_over_steps_are_those_of_the_list():
    gpu = GpuSampler(4, VOCAB, "cpu")
    rows = [row(OPTIONS["everything"], seed=i) for i in range(3)]
    for step in range(5):
        logits = logits_for("normal", 3, seed=step)
        want = sampler.sample(logits, rows, VOCAB).token_ids
        some = [0, 2] if step == 2 else [0, 1, 2]  # one is preempted for a step
        assert gpu.sample(logits, [rows[i] for i in some], some).token_ids == [want[i] for i in some]
        for i in some:
            rows[i].token_ids.append(want[i])


def test_a_hot_temperature_and_no_finite_logit():
    logits = logits_for("holes", 2)
    logits[1] = -torch.inf
    samples = GpuSampler(2, VOCAB, "cpu").sample(logits, [row({"temperature": 1e300}), row({})])
    assert samples.valid == [True, False]
    assert logits[0, samples.token_ids[0]] > -torch.inf
    assert samples.token_ids[1] == 0


def test_misuse_is_refused():
    gpu = GpuSampler(2, VOCAB, "cpu")
    with pytest.raises(ValueError, match="max_rows=2"):
        gpu.prepare([row({})] * 3)
    with pytest.raises(ValueError, match="bad_words"):
        gpu.prepare([SampleRow(SamplingParams(), [1, -1], 1, 3, bad_words=((1,),))])
    work, none = Workspace(2, VOCAB, "cpu"), torch.zeros(0, 3, dtype=torch.float64)
    inputs = Inputs(torch.zeros(2, 16, dtype=torch.float64), none[:, 0], none[:, :2], none)
    out = torch.zeros(2, 2, dtype=torch.int64)
    for logits, match in (
        (torch.zeros(2, VOCAB, dtype=torch.float64), "float32 or float16"),
        (torch.zeros(VOCAB, 2).t(), "contiguous rows"),
        (torch.zeros(2, VOCAB - 1), "columns"),
    ):
        with pytest.raises(ValueError, match=match):
            sample_rows(logits, inputs, Plan(2), work, out)
    with pytest.raises(ValueError, match="workspace holds 2"):
        sample_rows(torch.zeros(3, VOCAB), inputs, Plan(3), work, out)
    with pytest.raises(ValueError, match="`changed`"):
        sample_rows(torch.zeros(2, VOCAB), inputs, Plan(2, ruled=1), work, out)
    with pytest.raises(ValueError, match="top=65"):
        token_logprobs(torch.zeros(2, VOCAB), none[:, :2], out[0], VOCAB, 65)


def test_many_entries_fit():
    gpu = GpuSampler(2, VOCAB, "cpu")
    one = SampleRow(SamplingParams(allowed_token_ids=list(range(2, 90))), [1], 1, 3)
    tokens = gpu.sample(logits_for("flat", 2), [one, row({"allowed_token_ids": [100]})]).token_ids
    assert 2 <= tokens[0] < 90
    assert tokens[1] == 100

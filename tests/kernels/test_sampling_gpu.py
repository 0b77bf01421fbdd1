"""The device sampler on a GPU, natively and with TRITON_OVERRIDE_ARCH=sm75, against the CPU sampler."""

import math

import pytest
import sampling_cases as cases
import torch
from sampling_cases import KINDS, OPTIONS, row

from qengine.engine.logit_rules import apply_rules
from qengine.engine.sampler import SampleRow
from qengine.engine.sampler_gpu import GpuSampler
from qengine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGE = 152_064
MORE: dict[str, dict] = {
    "top_k_1000": {"top_k": 1000},
    "top_k_5000": {"top_k": 5000, "temperature": 1.5},
    "top_k_5000_top_p": {"top_k": 5000, "top_p": 0.7},
    "top_p_near_1": {"top_p": 0.9999},
    "min_p_tiny": {"min_p": 1e-4},
    "hot_top_p": {"temperature": 2.5, "top_p": 0.95},
    "top_k_1": {"top_k": 1},
}


def make(kinds, vocab, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([cases.logits_of(kind, width, generator) for kind in kinds])
    logits = logits.clamp(-6e4, 6e4) if dtype == torch.float16 else logits
    logits[:, vocab:] = 50.0 if dtype == torch.float16 else 5e4
    logits[logits == -6e4] = -math.inf
    return logits.to(dtype).cuda()


@pytest.mark.parametrize("vocab", [1, 31, 4096, 20_001, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_every_option_keeps_and_draws_what_the_reference_does(vocab, dtype):
    width = -(-vocab // 64) * 64 + 64
    options = {**OPTIONS, **MORE} if vocab > 100 else OPTIONS
    options = {n: o for n, o in options.items() if vocab > 30 or not {"allowed_token_ids", "logit_bias"} & set(o)}
    gpu = GpuSampler(300, vocab, "cuda")
    found = []
    for n, kind in enumerate(KINDS):
        rows = [row(o, position=(3 * i + n) % 7, seed=i + 100 * n, vocab=min(vocab, 30)) for i, o in
                enumerate(options.values())]  # fmt: skip
        logits = make([kind] * len(rows), vocab, width, dtype, seed=n)
        names = list(options)
        found += [f"{kind} {c}" for c in cases.complaints(gpu, logits, rows)]
    assert not found, f"{names}\n" + "\n".join(found[:20])


@pytest.mark.parametrize("name", [*OPTIONS, "top_k_1000", "hot_top_p"])
def test_draws_follow_the_reference_distribution(name):
    options = {**OPTIONS, **MORE}[name]
    if options.get("temperature") == 0:
        pytest.skip("nothing is drawn")
    vocab, count = LARGE, 8192
    logits = make(["peaked"], vocab, vocab, torch.float32, seed=3) * 0.7
    gpu = GpuSampler(256, vocab, "cuda")
    shared = row(options).token_ids
    rows = [SampleRow(SamplingParams(**options), shared, 6, seed) for seed in range(count)]
    tokens = []
    for start in range(0, count, 256):
        tokens += gpu.sample(logits, rows[start : start + 256], [0] * 256).token_ids
    want = cases.probabilities(logits[0].cpu(), rows[0], vocab)
    assert cases.chi_square(torch.tensor(tokens), want) < 6
    if name == "temperature":
        other = SampleRow(SamplingParams(temperature=0.8), shared, 6, 0)
        assert cases.chi_square(torch.tensor(tokens), cases.probabilities(logits[0].cpu(), other, vocab)) > 6


def test_rules_change_the_logits_bit_for_bit_as_the_reference_does():
    vocab = 20_000
    logits = make(KINDS, vocab, vocab, torch.float32, seed=9)
    rows = [
        row(
            {**OPTIONS["everything"], "frequency_penalty": 0.37, "min_tokens": 9 * (i % 2)},
            position=i + 1,
            seed=i,
            banned_ids=(0, 2, 8),
            bad_words=((4,), ((i + i * i) % 30, 12)),
        )
        for i in range(len(KINDS))
    ]
    gpu = GpuSampler(16, vocab, "cuda")
    gpu.sample(logits, rows)
    want = apply_rules(logits.cpu(), rows)
    assert torch.equal(gpu._changed[: len(rows), :vocab].cpu(), want)


def test_penalties_alone_change_the_logits_bit_for_bit_too():
    vocab, count = 20_000, 12
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.float16):
        logits = torch.randn(count, vocab, generator=generator).mul(0.5).to(dtype).cuda()
        rows = [
            row({"temperature": 0, "repetition_penalty": 1 + 0.1 * i, "frequency_penalty": -0.37}, seed=i, position=9)
            for i in range(count)
        ]
        for one in rows:  # the likely tokens have been seen, so that the penalties decide
            one.token_ids += torch.randint(vocab, (4000,), generator=generator).tolist()
        samples = GpuSampler(16, vocab, "cuda").sample(logits, rows)
        want = apply_rules(logits.cpu().float(), rows)
        assert samples.token_ids == [int((x == x.max()).nonzero()[0]) for x in want]


def test_counts_follow_the_sampled_tokens_and_survive_a_preemption():
    vocab = 20_000
    gpu, fresh = GpuSampler(8, vocab, "cuda"), None
    options = {"presence_penalty": 0.6, "frequency_penalty": 0.9, "repetition_penalty": 1.4, "temperature": 0.9}
    rows = [row(options, position=i, seed=i) for i in range(5)]
    generator = torch.Generator().manual_seed(4)
    for step in range(6):
        logits = torch.stack([cases.logits_of("peaked", vocab, generator) for _ in rows]).cuda()
        some = rows if step != 3 else rows[::2]  # the others are preempted for a step
        mine = gpu.sample(logits[: len(some)], some)
        fresh = GpuSampler(8, vocab, "cuda").sample(logits[: len(some)], some)
        assert mine.token_ids == fresh.token_ids
        for one, token in zip(some, mine.token_ids, strict=True):
            one.token_ids.append(token)
    places = [gpu.counts.place(one) for one in rows]
    for one, place in zip(rows, places, strict=True):
        counted = gpu.counts.table[place].cpu().int()
        output = torch.bincount(torch.tensor(one.token_ids[one.num_prompt :]), minlength=vocab)
        assert torch.equal(counted[:vocab] & 32767, output.int())
        assert set((counted < 0).nonzero()[:, 0].tolist()) == set(one.token_ids[: one.num_prompt])


def test_a_token_never_depends_on_the_rows_beside_it():
    vocab = LARGE
    options = list({**OPTIONS, **MORE}.values())
    rows = [row(options[i % len(options)], seed=i, position=i % 5) for i in range(60)]
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(60, vocab, device="cuda", generator=generator) * torch.linspace(0.05, 5, 60).cuda()[:, None]
    gpu = GpuSampler(64, vocab, "cuda")
    together = gpu.sample(logits, rows).token_ids
    for one in rows:
        gpu.counts.forget(one)
    reverse = gpu.sample(logits, rows[::-1], list(range(59, -1, -1))).token_ids[::-1]
    for one in rows:
        gpu.counts.forget(one)
    alone = [gpu.sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(60)]
    assert together == reverse == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_logprobs_are_of_the_raw_distribution_with_ranks(dtype):
    vocab, width = 32_000, 32_128
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, width, generator=generator).mul(3).to(dtype).cuda()
    logits[3] = logits[3].round()
    rows = [row({"logprobs": n, "temperature": t}, seed=n) for n, t in zip((0, 1, 5, 20, 64, -1, 100), (1, 0) * 4)]  # noqa: B905
    samples = GpuSampler(8, vocab, "cuda").sample(logits, rows)
    exact = logits.double().log_softmax(-1).cpu()
    for i, (item, one) in enumerate(zip(samples.logprobs, rows, strict=True)):
        count = one.params.logprobs if one.params.logprobs >= 0 else vocab
        assert len(item.token_ids) == count + 1
        assert item.token_ids[0] == samples.token_ids[i]
        torch.testing.assert_close(torch.tensor(item.logprobs).double(), exact[i, item.token_ids], rtol=2e-6, atol=5e-6)
        assert max(item.token_ids) < vocab
        assert item.ranks[1:] == list(range(1, count + 1))
        top = exact[i, :vocab].topk(count).values
        # beyond 64 they are sorted by their float32 logprobs
        sorted_by = 1e-9 if 0 <= one.params.logprobs <= 64 else 3e-6
        torch.testing.assert_close(exact[i, item.token_ids[1:]], top, rtol=0, atol=sorted_by)
        if 0 <= one.params.logprobs <= 64:
            raw = logits[i, :vocab].cpu()
            assert item.ranks[0] == int((raw > raw[item.token_ids[0]]).sum()) + 1
            assert len(set(item.token_ids[1:])) == count


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("name", ["greedy", "temperature", "top_k", "all", "penalties"])
def test_a_row_without_a_finite_maximum_is_not_valid(value, name):
    vocab = 20_000
    logits = torch.zeros(4, vocab, device="cuda")
    logits[1, 5000] = value
    logits[2] = -math.inf
    samples = GpuSampler(4, vocab, "cuda").sample(logits, [row(OPTIONS[name]) for _ in range(4)])
    assert samples.valid == [True, False, False, True]
    assert all(0 <= t < vocab for t in samples.token_ids)


@pytest.mark.parametrize("names", [["greedy"], ["temperature", "greedy"], ["all", "temperature", "greedy", "top_p"]])
def test_a_captured_graph_draws_what_eager_steps_draw(names):
    vocab, count = LARGE, 6
    gpu, plain = GpuSampler(8, vocab, "cuda"), GpuSampler(8, vocab, "cuda")
    logits = torch.randn(8, vocab, device="cuda") * 2
    make_rows = lambda step: [row(OPTIONS[names[i % len(names)]], seed=i, position=step) for i in range(count)]  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batch = gpu.prepare(make_rows(0), padded=8)
        assert batch.plan.fixed
        gpu.run(logits, batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gpu.run(logits, batch)
        for step in range(1, 4):
            logits.copy_(torch.randn_like(logits) * 2)
            rows = make_rows(step)
            batch = gpu.prepare(rows, padded=8)
            batch.out.fill_(-3)
            graph.replay()
            got = gpu.fetch(logits, batch).samples()
            assert got.token_ids == plain.sample(logits, rows).token_ids
            assert batch.tokens.tolist() == [*got.token_ids, -3, -3]
        stream.synchronize()


def test_strided_rows_and_shared_sources():
    vocab = 20_000
    wide = torch.randn(4, 2 * vocab + 24, device="cuda") * 3
    view = wide[:, 5 : 5 + vocab]
    rows = [row(OPTIONS["all"], seed=i) for i in range(6)]
    sources = [2, 0, 3, 1, 1, 1]
    gpu = GpuSampler(6, vocab, "cuda")
    assert gpu.sample(view, rows, sources).token_ids == gpu.sample(view[sources].contiguous(), rows).token_ids

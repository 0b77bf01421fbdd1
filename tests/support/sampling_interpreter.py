"""Run with TRITON_INTERPRET=1: the sampler's kernels on CPU tensors against the CPU sampler. Prints what failed."""

from __future__ import annotations

import itertools
import math
import sys
from unittest import mock

import sampling_cases as cases
import torch
from fixed_mask import random_mask, with_mask
from sampling_cases import KINDS, OPTIONS, row

from qengine.engine import row_parameters, sampler
from qengine.engine.logit_rules import apply_rules
from qengine.engine.sampler_gpu import GpuSampler
from qengine.kernels.fused.sampling import Shape

SMALL = Shape(block=128, group=16, chunk=2, tile=16, list=32, pivots=4, step=128, rays=8, part=64)
WIDE = Shape(block=64, group=16, chunk=4, tile=64, list=64, pivots=4, step=64, rays=4, part=32)
LONG = Shape(block=64, group=16, chunk=2, tile=64, list=256, pivots=4, step=64, rays=4, part=32)
DRAWN = ("temperature", "top_k", "top_p", "min_p", "top_k_top_p", "all", "attract", "bias")


def every_kind() -> list[str]:
    """Each kind of logits with a third of the options, so that all are met."""
    found = []
    names = itertools.cycle(OPTIONS)
    for n, kind in enumerate(KINDS):
        vocab = 131 + 16 * n
        some = [next(names) for _ in range(7)]
        rows = [row(OPTIONS[name], seed=i + 50 * n, position=(i + n) % 5) for i, name in enumerate(some)]
        generator = torch.Generator().manual_seed(n)
        logits = torch.stack([cases.logits_of(kind, vocab + 9, generator) for _ in rows])
        logits[:, vocab:] = 1e5
        logits = logits.half() if n % 4 == 2 else logits
        gpu = GpuSampler(8, vocab, "cpu", shape=SMALL if n % 2 else LONG)
        found += [f"{kind} {some}: {c}" for c in cases.complaints(gpu, logits, rows)]
    return found


def ties() -> list[str]:
    """Equal logits, more than a list holds: pivots between them round to themselves and their neighbours."""
    vocab = 150
    options = [{"top_p": 0}, {"top_p": 0.6}, {"top_k": 20, "min_p": 0.02}, {"top_k": 1}, {"min_p": 1.0}]
    rows = [row(o, seed=i) for i, o in enumerate(options)]
    values = torch.tensor([0.3, -1.9, 1234.56, -0.07, 0.0])[:, None]
    logits = values.expand(-1, vocab).contiguous()
    return [f"equal logits: {c}" for c in cases.complaints(GpuSampler(5, vocab, "cpu", shape=SMALL), logits, rows)]


def distribution(name: str, count: int = 24) -> list[str]:
    """Draws with evenly spaced numbers: each token comes as often as its probability says, within one."""
    vocab = 40
    rows = [row(OPTIONS[name], seed=3, position=2, index=i) for i in range(count)]
    logits = cases.logits_of("normal", vocab, torch.Generator().manual_seed(7)).expand(count, -1).contiguous()
    number = lambda seed, index, position: (index + 0.37) / count  # noqa: E731
    with mock.patch.object(row_parameters, "uniform", number):
        tokens = torch.tensor(GpuSampler(count, vocab, "cpu", shape=WIDE).sample(logits, rows).token_ids)
    want = cases.probabilities(logits[0], rows[0], vocab)
    counts = torch.bincount(tokens, minlength=vocab)
    far = (counts - want * count).abs() > 1.001
    found = [f"{name}: {int(counts[i])} draws of token {i}, {float(want[i]) * count:.2f} wanted" for i in far.nonzero()]
    return found + [f"{name}: token {i} has no probability" for i in ((counts > 0) & (want == 0)).nonzero()]


def rules() -> list[str]:
    """Changed logits bit for bit, bad words that leave nothing, and counts after steps."""
    vocab, found = 150, []
    more = {"banned_ids": (0, 2, 8), "bad_words": ((4,), (9, 12))}
    rows = [
        row({**OPTIONS["everything"], "frequency_penalty": 0.37, "min_tokens": 5}, position=3, **more),
        row({"temperature": 1, "allowed_token_ids": [4, 7]}, bad_words=((4,), (7,))),
        row({"temperature": 1}, bad_words=((4,), (7,)), seed=2),
        row({"temperature": 0, "repetition_penalty": 1.7}, position=4, seed=4),
    ]
    logits = torch.stack([cases.logits_of("normal", vocab, torch.Generator().manual_seed(i)) for i in range(4)])
    logits[2] = -math.inf
    logits[2, [4, 7]] = 1.0
    gpu = GpuSampler(4, vocab, "cpu", shape=SMALL)
    for step in range(3):
        samples = gpu.sample(logits, rows)
        want = apply_rules(logits, rows)
        # the last row has penalties only and no copy
        if not torch.equal(gpu._changed[:3, :vocab], want[:3]) or samples.token_ids[3] != int(want[3].argmax()):
            found.append(f"changed logits differ at step {step}")
        if samples.token_ids[1] not in (4, 7) or samples.token_ids[2] not in (4, 7):
            found.append("a bad word that leaves nothing was applied")
        for one, token in zip(rows, samples.token_ids, strict=True):
            one.token_ids.append(token)
    return found


def masks() -> list[str]:
    """Rows with a grammar's mask, beside others, with biases, penalties and bans; changed logits bit for bit."""
    vocab, found = 150, []
    generator = torch.Generator().manual_seed(6)
    options = [OPTIONS["everything"], {"temperature": 0}, OPTIONS["top_p"], OPTIONS["allowed"], OPTIONS["penalties"]]
    rows = [row(o, seed=i, position=3, banned_ids=(0, 2), bad_words=((4,),)) for i, o in enumerate(options)]
    for i, one in enumerate(rows[:4]):
        with_mask(one, random_mask(vocab, (0.5, 0.02, 0.8, 1.0)[i], generator))
    for kind in ("normal", "holes"):
        logits = torch.stack([cases.logits_of(kind, vocab + 9, generator) for _ in rows])
        gpu = GpuSampler(5, vocab, "cpu", shape=SMALL)
        found += [f"masks, {kind}: {c}" for c in cases.complaints(gpu, logits, rows)]
        if not torch.equal(gpu._changed[:5, :vocab], apply_rules(logits[:, :vocab], rows)):
            found.append(f"masked logits of {kind} differ")
    return found


def logprobs() -> list[str]:
    """Logprobs, ranks and the most likely tokens, equal logits among them."""
    vocab, found = 100, []
    logits = torch.stack([cases.logits_of(k, vocab + 7, torch.Generator().manual_seed(8)) for k in ("normal", "tied")])
    rows = [row({"logprobs": 3, "temperature": 2.0}), row({"logprobs": 6})]
    samples = GpuSampler(2, vocab, "cpu", shape=SMALL).sample(logits, rows)
    exact = logits.double().log_softmax(-1)
    for i, item in enumerate(samples.logprobs):
        order = logits[i, :vocab].sort(descending=True, stable=True).indices[: rows[i].params.logprobs].tolist()
        token = samples.token_ids[i]
        rank = int((logits[i, :vocab] > logits[i, token]).sum()) + 1
        if item.token_ids != [token, *order] or item.ranks != [rank, *range(1, len(order) + 1)]:
            found.append(f"line {i}: {item}, wanted {[token, *order]} of rank {rank}")
        if (torch.tensor(item.logprobs).double() - exact[i, item.token_ids]).abs().max() > 3e-6:
            found.append(f"line {i}: logprobs {item.logprobs}")
    return found


def unusable() -> list[str]:
    """Rows without a finite maximum."""
    logits = torch.zeros(4, 90)
    logits[1, 70], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    for name in ("greedy", "temperature", "top_p"):
        samples = GpuSampler(4, 90, "cpu", shape=SMALL).sample(logits, [row(OPTIONS[name])] * 4)
        if samples.valid != [True, False, False, False] or samples.token_ids[1:] != [0, 0, 0]:
            return [f"{name}: {samples}"]
    return []


def main() -> int:
    """Run all; the number of failures is the exit status."""
    assert sampler.uniform is row_parameters.uniform, "the numbers must be the CPU sampler's"
    found = every_kind() + ties() + [c for name in DRAWN for c in distribution(name)] + rules() + masks()
    found += logprobs() + unusable()
    print("\n".join(f"FAILED {c}" for c in found))
    print(f"{len(found)} failures in the interpreter")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())

"""Rows and logits for the device sampler, and what the CPU sampler makes of them."""

from __future__ import annotations

import math

import torch

from qengine.engine import sampler
from qengine.engine.logit_rules import apply_rules
from qengine.engine.sampler import SampleRow
from qengine.engine.sampler_gpu import GpuSampler
from qengine.kernels.fused.sampling_ref import kept_ref
from qengine.sampling_params import SamplingParams

EXACT = 3e-6
ROUGH = 1e-4
"""The CPU sampler's sums over a sorted row are float32's."""
OPTIONS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k_wide": {"top_k": 60},
    "top_k_more_than_there_are": {"top_k": 9_999_999},
    "top_p": {"top_p": 0.8},
    "top_p_small": {"top_p": 1e-4},
    "top_p_zero": {"top_p": 0},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "top_k_top_p": {"top_k": 30, "top_p": 0.9},
    "top_k_min_p": {"top_k": 20, "min_p": 0.02},
    "top_p_min_p": {"top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.03},
    "cold": {"temperature": 1e-4, "top_p": 0.999},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "attract": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": -0.25, "top_k": 12},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 11: 1.5}, "top_p": 0.9},
    "allowed": {"allowed_token_ids": [1, 5, 9, 13, 17], "temperature": 1.1},
    "everything": {
        "temperature": 0.8, "top_k": 25, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.1, "logit_bias": {2: 3.0, 4: 1.0},
    },
}  # fmt: skip


def row(options: dict, *, position: int = 0, seed: int = 5, prompt: int = 6, vocab: int = 30, **more) -> SampleRow:
    """A row with some prompt and `position` output tokens, all below `vocab`."""
    tokens = [(seed * 7 + 3 * i) % vocab for i in range(prompt)] + [(seed + i * i) % vocab for i in range(position)]
    return SampleRow(SamplingParams(**options), tokens, prompt, seed, **more)


def logits_of(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """float32 [vocab]: random, and what is hard for a search without a sort."""
    x = torch.randn(vocab, generator=generator)
    if kind == "flat":
        return x * 0.3
    if kind == "peaked":
        return x * 4
    if kind == "tied":
        return (x * 3).round() / 2
    if kind == "equal":
        return torch.full((vocab,), float(x[0]))
    if kind == "holes":
        x[torch.rand(vocab, generator=generator) < 0.5] = -math.inf
        return x * 2
    if kind == "one":
        return torch.full((vocab,), -math.inf).index_fill(0, torch.tensor([vocab // 3]), 1.0)
    if kind == "huge":
        return x * 1e4
    if kind == "close":  # neighbours in float32, which a division makes equal
        return 300 + x * 1e-4
    if kind == "zeros":
        return torch.where(x > 0.5, x, torch.where(x > 0, 0.0, -0.0))
    return x * 2


KINDS = ("normal", "flat", "peaked", "tied", "equal", "holes", "one", "huge", "close", "zeros")


def scaled(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """(scores - max) / T of one row, as sampler.draw has it, -inf below min_p."""
    s = (scores - scores.max()) / torch.tensor(params.temperature, dtype=torch.float32)
    if params.min_p > 0:
        s = s.masked_fill(s < torch.tensor(params.min_p, dtype=torch.float32).log(), -math.inf)
    return s


def kept(scores: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """bool [V]: the tokens that the CPU sampler can draw."""
    s = sampler._cut_top(scaled(scores, row.params)[None], [row])[0]
    return s > -math.inf


def exactly_kept(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """bool [V]: the tokens kept, with sums in float64."""
    top_k = params.top_k if 0 < params.top_k < scores.numel() else 0
    log_min_p = float(torch.tensor(params.min_p, dtype=torch.float32).log())
    return kept_ref(scores, params.temperature, top_k, params.top_p if params.top_p < 1 else 2.0, log_min_p)


def complaint(logits: torch.Tensor, one: SampleRow, vocab: int, token: int, cut: float | None) -> str | None:
    """What is wrong with the token, and the cut, that a device sampler chose, or None.

    The kept tokens must be those of float64 sums, but where top_p falls within EXACT of the mass at a token's edge, and
    the CPU sampler's within ROUGH; the token the CPU sampler's, but where the uniform number falls within EXACT of its
    edge.
    """
    scores = apply_rules(logits[None, :vocab].float(), [one])[0]
    if one.params.greedy:
        want = int((scores == scores.max()).nonzero()[0])
        return None if token == want else f"greedy token {token}, not {want}"
    s = scaled(scores, one.params)
    keep = exactly_kept(scores, one.params)
    if not _at_edge(s, one.params, keep, kept(scores, one), ROUGH):
        return f"the CPU sampler keeps {int(kept(scores, one).sum())} tokens, not {int(keep.sum())}"
    if cut is not None:
        mine = (scores >= cut) & (s > -math.inf)
        if not _at_edge(s, one.params, mine, keep, EXACT):
            return f"kept {int(mine.sum())} tokens, not {int(keep.sum())}"
        keep = mine
    if not bool(keep[token]):
        return f"token {token} is not among the {int(keep.sum())} kept"
    mass = s.double().exp().masked_fill(~keep, 0)
    cumulative = mass.cumsum(0) / mass.sum()
    number = sampler.uniform(one.seed, one.index, one.num_output)
    low = float(cumulative[token] - mass[token] / mass.sum())
    if not low - EXACT <= number <= float(cumulative[token]) + EXACT:
        return f"token {token} has {low}..{float(cumulative[token])}, the number is {number}"
    return None


def _at_edge(s: torch.Tensor, params: SamplingParams, mine: torch.Tensor, keep: torch.Tensor, close: float) -> bool:
    """True if two sets are equal, or the smaller as good as reaches top_p and the larger would not without its least
    likely tokens."""
    if torch.equal(mine, keep):
        return True
    if params.top_p >= 1:
        return False
    small, large = (mine, keep) if mine.sum() < keep.sum() else (keep, mine)
    if not small.any():
        return False
    ranked = s.sort(descending=True).values
    ranked = ranked[: params.top_k] if 0 < params.top_k < len(ranked) else ranked
    mass = ranked.double().exp()
    reached = float(mass[ranked >= s[small].min()].sum() / mass.sum())
    without = float(mass[ranked > s[large].min()].sum() / mass.sum())
    return bool(large[small].all()) and reached > params.top_p - close and without < params.top_p + close


def complaints(gpu: GpuSampler, logits: torch.Tensor, rows: list[SampleRow]) -> list[str]:
    """One step of the device sampler on all rows, against the CPU sampler row by row."""
    before = logits.clone()
    gpu.work.cut.fill_(math.nan)
    gpu.work.left.fill_(-1)
    samples = gpu.sample(logits, rows)
    found = [] if torch.equal(logits.nan_to_num(7), before.nan_to_num(7)) else ["the logits were changed"]
    cuts, host = gpu.work.cut.tolist(), logits.cpu()
    for i, one in enumerate(rows):
        p = one.params
        cuts_here = not p.greedy and (0 < p.top_k < gpu.vocab_size or p.top_p < 1 or p.min_p > 0)
        valid = bool(apply_rules(host[i : i + 1, : gpu.vocab_size].float(), [one]).max().isfinite())
        if samples.valid[i] != valid:
            found.append(f"row {i}: valid is {samples.valid[i]}")
        if not valid:
            continue
        cut = cuts[i] if cuts_here and _wrote_cuts(gpu) else None
        if cut is None and not math.isnan(cuts[i]):
            found.append(f"row {i} has a cut, but asked for none")
        wrong = complaint(host[i], one, gpu.vocab_size, samples.token_ids[i], cut)
        if wrong:
            found.append(f"row {i} {p.temperature=} {p.top_k=} {p.top_p=} {p.min_p=}: {wrong}")
    return found


def _wrote_cuts(gpu: GpuSampler) -> bool:
    from qengine.kernels.fused.sampling import runs_kernels

    return runs_kernels(gpu.work.cut)


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean, rare tokens counted as one; infinite if one of
    probability 0 was drawn."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    if counts[probs == 0].sum() > 0:
        return math.inf
    want = probs * len(tokens)
    common = want >= 5
    rare = want[~common].sum()
    parts = (counts[common] - want[common]) ** 2 / want[common]
    total, freedom = float(parts.sum()), int(common.sum()) - 1
    if rare >= 5:
        total += float((counts[~common].sum() - rare) ** 2 / rare)
        freedom += 1
    return (total - freedom) / math.sqrt(2 * freedom) if freedom > 0 else 0.0


def probabilities(logits: torch.Tensor, one: SampleRow, vocab: int) -> torch.Tensor:
    """float64 [V]: what the CPU sampler draws from."""
    scores = apply_rules(logits[None, :vocab].float(), [one])[0]
    mass = scaled(scores, one.params).double().exp().masked_fill(~kept(scores, one), 0)
    return mass / mass.sum()

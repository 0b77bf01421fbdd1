"""Logits to tokens, batched over rows, on the logits' device.

The order is vLLM's: grammar, allowed ids, bad words, min_tokens, logit bias, penalties; then the most likely token for
greedy rows; for the others temperature, min_p, top_k, top_p and one draw.

A draw uses one uniform number per row, a hash of (seed, sequence index, position in the output), and the inverse of
the cumulative distribution in token order. No generator has a state that others could advance: a row's draw is a
function of its own logits, parameters and position alone, however the batch is composed, and after a preemption too.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import torch

from qengine.engine.logit_rules import apply_rules
from qengine.sampling_params import SamplingParams
from qengine.structured.matcher import TokenMatcher

NARROW_TOP_K = 1024
"""Up to this top_k a partial sort is used. It depends on the row's own parameters, never on its neighbours'."""


@dataclass
class SampleRow:
    """What the sampler knows of one sequence whose next token is due.

    token_ids: prompt and output so far, the sequence's own list; num_prompt of them are the prompt. seed, index: of
    the request, and of the sequence in it. banned_ids: end tokens and stop token ids that min_tokens holds back.
    bad_words: token sequences. has_rules: False if the logits are taken as they are. matcher: of the row's grammar,
    if it has one; it then decides over bad words, banned and allowed ids too (token_masks.py).
    """

    params: SamplingParams
    token_ids: list[int]
    num_prompt: int
    seed: int
    index: int = 0
    banned_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    has_rules: bool = field(init=False)
    matcher: TokenMatcher | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        p = self.params
        penalized = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        banned = bool(self.banned_ids and p.min_tokens)
        listed = bool(self.bad_words or p.logit_bias or p.allowed_token_ids is not None)
        self.has_rules = penalized or banned or listed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def needs_tokens(self) -> bool:
        """True if the next token cannot be drawn before the ones before it are known."""
        return bool(self.bad_words) or self.matcher is not None

    def attach(self, matcher: TokenMatcher) -> None:
        """Limit the row to a grammar, before its first token."""
        self.matcher, self.has_rules = matcher, True

    def completing_words(self) -> tuple[int, ...]:
        """Tokens that would complete a bad word in the output."""
        if not self.bad_words:
            return ()
        output = self.token_ids[self.num_prompt :]
        return tuple(w[-1] for w in self.bad_words if len(w) == 1 or tuple(output[1 - len(w) :]) == w[:-1])


@dataclass
class TokenLogprobs:
    """One position: the token itself, then the most likely tokens; logprobs natural, ranks from 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass
class Samples:
    """token_ids [R]. logprobs [R]: None for rows that asked for none. valid [R]: False if no logit was finite."""

    token_ids: list[int]
    valid: list[bool]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments everywhere."""
    data = struct.pack("<QQQ", seed % 2**64, index, position)
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return (bits >> 11) / 2**53


def sample(logits: torch.Tensor, rows: list[SampleRow], vocab_size: int) -> Samples:
    """Choose a token for each row.

    logits: float32 [R, V], not changed. vocab_size: ids from here on are padding of the head and never sampled.
    """
    scores = apply_rules(logits[:, :vocab_size], rows)
    best = scores.max(dim=-1)
    tokens = best.indices
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        some = [rows[i] for i in drawn]
        if len(drawn) == len(rows):
            tokens = draw(scores, best.values, some)
        else:
            at = torch.tensor(drawn, device=logits.device)
            tokens = tokens.index_copy(0, at, draw(scores[at], best.values[at], some))
    # One copy to the host a step: tokens and whether the row had any finite logit.
    token_ids, valid = torch.stack((tokens, torch.isfinite(best.values).long())).tolist()
    return Samples(token_ids, [bool(v) for v in valid], _row_logprobs(logits, rows, token_ids, vocab_size))


def draw(scores: torch.Tensor, best: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """int64 [R]: one draw per row from softmax(scores / temperature), cut by min_p, top_k and top_p.

    scores: float32 [R, V]. best [R]: each row's maximum, subtracted first, so no temperature overflows.
    """
    device = scores.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device)
    scores = (scores - best[:, None]) / temperature[:, None]
    if any(row.params.min_p > 0 for row in rows):
        min_p = torch.tensor([row.params.min_p for row in rows], dtype=torch.float32, device=device)
        scores = scores.masked_fill(scores < min_p.log()[:, None], float("-inf"))
    scores = _cut_top(scores, rows)
    cumulative = scores.exp().double().cumsum(dim=-1)
    numbers = [uniform(row.seed, row.index, row.num_output) for row in rows]
    target = torch.tensor(numbers, dtype=torch.float64, device=device) * cumulative[:, -1]
    chosen = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return chosen.clamp_(max=scores.shape[1] - 1)


def _cut_top(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Set logits outside top_k and top_p to -inf, each row with its own limits. Equal logits stay or go together."""
    vocab = scores.shape[1]
    narrow, wide = [], []
    for i, row in enumerate(rows):
        if 0 < row.params.top_k <= min(NARROW_TOP_K, vocab):
            narrow.append(i)
        elif 0 < row.params.top_k < vocab or row.params.top_p < 1:
            wide.append(i)
    if not narrow and not wide:
        return scores
    lowest = torch.full((len(rows),), float("-inf"), device=scores.device)
    if scores.device.type == "cpu":
        wide = _cut_by_mass(scores, rows, wide, lowest)
    for group in (narrow, wide):
        if group:
            at = torch.tensor(group, device=scores.device)
            lowest[at] = _lowest_kept(scores[at], [rows[i].params for i in group], partial=group is narrow)
    return scores.masked_fill(scores < lowest[:, None], float("-inf"))


def _cut_by_mass(scores: torch.Tensor, rows: list[SampleRow], wide: list[int], lowest: torch.Tensor) -> list[int]:
    """Fill `lowest` where top_p alone cuts within the most likely tokens; returns the rows left to sort.

    A CPU sorts a whole vocabulary slowly, and few distributions need it. Whether one does depends on its row alone.
    """
    vocab = scores.shape[1]
    group = [i for i in wide if not 0 < rows[i].params.top_k < vocab]
    if not group or vocab <= NARROW_TOP_K:
        return wide
    some = scores[group]
    ranked = some.topk(NARROW_TOP_K, dim=-1).values
    mass = ranked.exp().double().cumsum(dim=-1) / some.exp().double().sum(dim=-1, keepdim=True)
    top_p = torch.tensor([[rows[i].params.top_p] for i in group], dtype=torch.float64)
    kept = 1 + (mass < top_p).sum(dim=-1)  # up to and with the token that reaches top_p
    done = (kept <= NARROW_TOP_K).tolist()
    values = ranked.gather(1, kept[:, None].clamp(max=NARROW_TOP_K) - 1)[:, 0].tolist()
    for i, value, ready in zip(group, values, done, strict=True):
        if ready:
            lowest[i] = value
    ready_rows = {i for i, ready in zip(group, done, strict=True) if ready}
    return [i for i in wide if i not in ready_rows]


def _lowest_kept(scores: torch.Tensor, params: list[SamplingParams], *, partial: bool) -> torch.Tensor:
    """float32 [R]: the smallest logit that top_k, then top_p, keep."""
    vocab, device = scores.shape[1], scores.device
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    if partial:
        ranked = scores.topk(int(top_k.max()), dim=-1).values
    else:
        ranked = scores.sort(dim=-1, descending=True).values
    outside = torch.arange(ranked.shape[1], device=device) >= top_k[:, None]
    mass = ranked.masked_fill(outside, float("-inf")).softmax(dim=-1).double()
    before = mass.cumsum(dim=-1) - mass
    # top_p = 1 keeps all: the sum before the last token may round to 1.
    top_p = torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in params], dtype=torch.float64, device=device)
    kept = ((before < top_p[:, None]) & ~outside).sum(dim=-1).clamp_(min=1)
    return ranked.gather(1, kept[:, None] - 1)[:, 0]


def _row_logprobs(
    logits: torch.Tensor, rows: list[SampleRow], token_ids: list[int], vocab_size: int
) -> list[TokenLogprobs | None]:
    """Logprobs of the rows that asked for them; None for the others."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if wanted:
        counts = [rows[i].params.logprobs or 0 for i in wanted]
        some = logits if len(wanted) == len(rows) else logits[torch.tensor(wanted, device=logits.device)]
        for i, item in zip(wanted, logprobs_of(some, [token_ids[i] for i in wanted], counts, vocab_size), strict=True):
            result[i] = item
    return result


def logprobs_of(logits: torch.Tensor, token_ids: list[int], counts: list[int], vocab_size: int) -> list[TokenLogprobs]:
    """For each row the logprob of its token and of its most likely `counts[row]` tokens (-1: all).

    logits: float32 [R, V], raw. The distribution is over all V columns; padding ids are not listed.
    """
    logprobs = logits.log_softmax(dim=-1)[:, :vocab_size]
    at = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(1, at)
    rank = (logprobs > own).sum(dim=-1) + 1
    counts = [logprobs.shape[1] if count < 0 else min(count, logprobs.shape[1]) for count in counts]
    top = logprobs.topk(max(counts), dim=-1)
    own_list, rank_list = own[:, 0].tolist(), rank.tolist()
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprobs(
            [token, *indices[i][:count]],
            [own_list[i], *values[i][:count]],
            [rank_list[i], *range(1, count + 1)],
        )
        for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]

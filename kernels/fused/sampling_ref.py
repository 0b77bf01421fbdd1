"""Plain torch reference of the device sampler: the same parameters, one row at a time, by sorting."""

from __future__ import annotations

import math

import torch

from . import sampling_kernel as columns
from . import sampling_rules_kernel as rules

NEVER = float("-inf")


def column(name: str) -> int:
    """Number of a parameter's column (sampling_kernel.py names them)."""
    value: int = getattr(columns, name).value
    return value


def in_mask(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [vocab]: the bits of a mask, int32 [>= vocab / 32]; bit t % 32 of word t // 32 is token t's."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (((words[:, None] >> shifts) & 1) != 0).flatten()[:vocab]


def change_row(
    scores: torch.Tensor,
    row: torch.Tensor,
    entries: torch.Tensor,
    counts: torch.Tensor | None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [V]: `scores` with a row's mask, bans, biases and penalties.

    row: float64 [16], entries: float64 [E, 3] of all rows (token, bias, bits), counts: int16 [., V], masks: int32
    [., >= V / 32].
    """
    scores = scores.float()
    first, count = int(row[column("FIRST")]), int(row[column("ENTRIES")])
    own = entries[first : first + count]
    tokens, bits = own[:, 0].long(), own[:, 2].long()
    if row[column("ALLOW")] < 0:
        if masks is None:
            raise ValueError("sampling: rows with a mask need `masks`")
        words = masks[-1 - int(row[column("ALLOW")])]
        scores = scores.masked_fill(~in_mask(words, scores.numel()), NEVER)
    if row[column("ALLOW")] > 0:
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[tokens[(bits & rules.ALLOWED.value) != 0]] = True
        scores = scores.masked_fill(~allowed, NEVER)
    bad = scores.clone()
    bad[tokens[(bits & rules.BAD_WORD.value) != 0]] = NEVER
    scores = scores.clone() if bad.max() == NEVER else bad
    scores[tokens[(bits & rules.BANNED.value) != 0]] = NEVER
    scores[tokens] += own[:, 1].float()
    if counts is None or row[column("COUNTS")] < 0:
        return scores
    seen = counts[int(row[column("COUNTS")])][: scores.numel()].to(scores.device)
    times = (seen.int() & columns.MOST.value).float()
    repetition, presence, frequency = (row[column(name)].float() for name in ("REPETITION", "PRESENCE", "FREQUENCY"))
    scores = torch.where(seen != 0, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - frequency * times - presence * (times > 0)


def kept_ref(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, log_min_p: float) -> torch.Tensor:
    """bool [V]: the logits that min_p, top_k, then top_p keep of float32 `scores` [V]; sums in float64.

    top_k 0, top_p > 1, log_min_p -inf: no limit. Equal (scores - max) / temperature stay or go together, and count one
    by one where top_k ends among them.
    """
    s = (scores - scores.max()) / torch.tensor(temperature, dtype=torch.float32)
    s = torch.where(s >= torch.tensor(log_min_p, dtype=torch.float32), s, NEVER)
    ranked = s.sort(descending=True).values
    if 0 < top_k < ranked.numel():
        ranked = ranked[:top_k]
    lowest = ranked[-1]
    if top_p <= 1:
        mass = ranked.double().exp()
        before = mass.cumsum(0) - mass
        count = int((before < top_p * mass.sum()).sum())
        lowest = ranked[max(count, 1) - 1]
    return (s >= lowest) & (s > NEVER)


def choose_ref(scores: torch.Tensor, row: torch.Tensor) -> tuple[int, bool]:
    """(token, whether the maximum is finite) of float32 `scores` [V] with a row's parameters [16]."""
    best = scores.max()
    if not bool(torch.isfinite(best)):
        return 0, False
    kind = int(row[column("KIND")])
    if kind == columns.GREEDY.value:
        return int((scores == best).nonzero()[0]), True
    temperature = float(row[column("TEMPERATURE")])
    mass = ((scores - best) / torch.tensor(temperature, dtype=torch.float32)).exp().double()
    if kind == columns.CUT.value:
        limits = (int(row[column("TOP_K")]), float(row[column("TOP_P")]), float(row[column("LOG_MIN_P")]))
        mass = mass.masked_fill(~kept_ref(scores, temperature, *limits), 0)
    cumulative = mass.cumsum(0)
    token = int((cumulative <= row[column("UNIFORM")].item() * cumulative[-1]).sum())
    return min(token, int(mass.nonzero()[-1])), True


def sample_rows_ref(
    logits: torch.Tensor,
    rows: torch.Tensor,
    entries: torch.Tensor,
    counts: torch.Tensor | None,
    vocab: int,
    out: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> None:
    """Write out int64 [2, R] (tokens, valid) for parameters rows float64 [R, 16]; kind 0 rows are left alone.

    A row's token is added to its counts, if it has any.
    """
    for i in range(rows.shape[0]):
        row = rows[i]
        if row[column("KIND")] == 0:
            continue
        scores = logits[int(row[column("SOURCE")]), :vocab].float()
        if row[column("CHANGED")] >= 0 or row[column("COUNTS")] >= 0:
            scores = change_row(scores, row, entries, counts, masks)
        token, valid = choose_ref(scores, row)
        out[0, i], out[1, i] = token, int(valid)
        of = int(row[column("COUNTS")])
        if of >= 0 and counts is not None and int(counts[of, token]) & columns.MOST.value != columns.MOST.value:
            counts[of, token] += 1


def logprobs_ref(
    logits: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor, vocab: int, top: int, out: torch.Tensor
) -> None:
    """Write out int32 [L, 2 + 2 top]: logprob (float32 bits), rank, then `top` tokens and their logprobs' bits.

    lines float64 [L, 2]: row of the logits, row of `tokens`. The distribution is over all columns; ids from `vocab` on
    are not listed. The rank is 1 and how many logits are larger; equal logits are listed in token order.
    """
    for i, (row, of) in enumerate(lines.long().tolist()):
        x = logits[row].float()
        log_total = float((x - x.max()).double().exp().sum().log())
        logprobs = x - x.max() - log_total
        token = int(tokens[of])
        order = x[:vocab].sort(descending=True, stable=True).indices[:top]
        out[i, 0] = logprobs[token].view(torch.int32)
        out[i, 1] = int((x[:vocab] > x[token]).sum()) + 1
        out[i, 2 : 2 + top] = order.int()
        out[i, 2 + top : 2 + 2 * top] = logprobs[order].view(torch.int32)


def uniform_edges(cumulative: torch.Tensor, token: int) -> tuple[float, float]:
    """The range of uniform numbers for which `token` is drawn, of float64 cumulative masses [V]."""
    total = float(cumulative[-1])
    low = float(cumulative[token - 1]) / total if token else 0.0
    return low, min(float(cumulative[token]) / total, math.nextafter(1.0, 2.0))

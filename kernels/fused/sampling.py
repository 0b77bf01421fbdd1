"""Sampling on the device: logits [R, V] to tokens, with no sort of the vocabulary and no wait for the device.

What a row asks for is 16 float64 parameters on the device (sampling_kernel.py names the columns), so a new step changes
one buffer and no launch. Which kernels run is a `Plan`, facts that the host knows of a batch:

    greedy                     block_stats, finish_plain                        one read of the logits
    temperature                the same, with sums
    top_k, top_p, min_p        block_stats, finish_cut, finish_flat             one read and what may be kept
    no top_k, or a large one   finish_list, tally_blocks and choose_range       up to four reads more of rows that are
                               (twice), gather_range, finish_wide               flat, nothing of the others
                               before finish_flat
    bans, biases, grammars     change_rows, change_entries before
    penalties                  applied as logits are read; count_tokens after
    logprobs                   raw_stats, finish_logprobs after

Plans without bans, biases, grammars, penalties and logprobs can be captured in a CUDA graph: all buffers stay where
they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton

from .card import capability
from .sampling_cut_kernel import finish_cut, finish_list
from .sampling_flat_kernel import finish_flat
from .sampling_kernel import ROW, block_stats, finish_plain
from .sampling_keys import STATE
from .sampling_logprobs_kernel import finish_logprobs, raw_stats
from .sampling_ref import logprobs_ref, sample_rows_ref
from .sampling_rules_kernel import ENTRY, change_entries, change_rows, count_tokens
from .sampling_wide_kernel import choose_range, finish_wide, gather_range, tally_blocks

PARAMETERS: int = ROW.value
ENTRY_VALUES: int = ENTRY.value
MOST_TOP = 64
"""Most likely tokens that finish_logprobs lists; for more, sort."""


@dataclass(frozen=True)
class Shape:
    """Launch constants. They depend on the vocabulary alone, so that sums have one order for every batch.

    block, group: tokens of a block and of a group in it. warps: of block_stats, finish_plain, finish_cut, finish_list,
    finish_flat, tally_blocks, finish_wide. chunk: groups that finish_cut gathers at a time. tile, list: most logits in
    the list that finish_cut and finish_list search. pivots, step: of finish_flat; rays, part: of tally_blocks.
    """

    block: int = 4096
    group: int = 32
    warps: tuple[int, int, int, int, int, int, int] = (4, 8, 8, 8, 8, 4, 8)
    chunk: int = 64
    tile: int = 1024
    list: int = 4096
    pivots: int = 8
    step: int = 2048
    rays: int = 16
    part: int = 256


TURING = Shape(step=1024)
"""With steps of 2,048 finish_flat needs more than the 255 registers of a thread in the code of Triton 3.6 to 3.8."""


def shape_for(device: torch.device) -> Shape:
    """The launch constants of a device."""
    return TURING if device.type == "cuda" and capability(device) < 80 else Shape()


@dataclass(frozen=True)
class Plan:
    """What a batch needs of the device.

    rows: R. plain: some row is greedy or drawn from the whole softmax; draws: some row is not greedy; cuts: some row
    has top_k, top_p or min_p; wide: more than finish_cut looks at may be kept. ruled: rows
    that bans, biases or masks change; entries: of all of them; counted: some row has penalties.
    lines: rows with logprobs; top: the most that one of them lists.
    """

    rows: int
    plain: bool = True
    draws: bool = False
    cuts: bool = False
    wide: bool = False
    ruled: int = 0
    entries: int = 0
    counted: bool = False
    lines: int = 0
    top: int = 0

    @property
    def fixed(self) -> bool:
        """True if a CUDA graph can hold this plan's launches."""
        return not (self.ruled or self.counted or self.lines)


class Workspace:
    """Scratch of the sampler's kernels for up to `rows` rows: about 90 KB a row at 152,064 tokens.

    cut: float32 [rows], after a step with cuts the smallest logit each such row kept; for tests.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device | str, shape: Shape | None = None) -> None:
        shape = shape or shape_for(torch.device(device))
        self.rows, self.vocab, self.shape = rows, vocab, shape
        self.blocks = triton.cdiv(vocab, shape.block)
        self.groups = self.blocks * (shape.block // shape.group)
        # 64 covers 262,144 tokens: one compiled kernel for all usual vocabularies
        self.blocks_padded = max(64, triton.next_power_of_2(self.blocks))
        self.steps = max(64, triton.next_power_of_2(triton.cdiv(vocab, shape.step)))

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.bmax = empty(rows, self.blocks, dtype=torch.float32)
        self.bsum = empty(rows, self.blocks, dtype=torch.float32)
        self.gmax = empty(rows, self.groups, dtype=torch.float32)
        self.gsum = empty(rows, self.groups, dtype=torch.float32)
        self.chosen = empty(rows, self.groups, dtype=torch.int32)
        self.list = empty(rows, 2, shape.list, dtype=torch.int32)
        self.sums = empty(rows, self.steps, dtype=torch.float64)
        self.state = empty(rows, STATE.value, dtype=torch.float64)
        self.starts = empty(rows, self.blocks_padded, dtype=torch.int32)
        self.tcount = empty(2, rows, self.blocks, shape.rays, dtype=torch.int32)
        self.tmass = empty(2, rows, self.blocks, shape.rays, dtype=torch.float32)
        self.running = empty(rows, shape.list, dtype=torch.float64)
        self.cut = empty(rows, dtype=torch.float32)
        self.left = empty(rows, dtype=torch.int32)


@dataclass(frozen=True)
class Inputs:
    """A step's parameters on the device, all float64.

    rows [., 16]; ruled [.]: numbers of the rows with rules; lines [., 2]: row of the logits and row of the batch for
    each line of logprobs; entries [., 3]: token, bias, bits (sampling_rules_kernel.py).
    """

    rows: torch.Tensor
    ruled: torch.Tensor
    lines: torch.Tensor
    entries: torch.Tensor


def runs_kernels(x: torch.Tensor) -> bool:
    """True if x is served by the kernels: on a GPU, or in Triton's interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def check_logits(logits: torch.Tensor, vocab: int) -> None:
    """Raise ValueError for logits that the kernels do not take."""
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.float16) or logits.stride(1) != 1:
        raise ValueError(
            f"sampling: logits must be float32 or float16 [rows, V] with contiguous rows, got {logits.dtype} "
            f"{list(logits.shape)} with strides {list(logits.stride())}"
        )
    if logits.shape[1] < vocab:
        raise ValueError(f"sampling: logits have {logits.shape[1]} columns, the vocabulary {vocab} tokens")


def sample_rows(
    logits: torch.Tensor,
    inputs: Inputs,
    plan: Plan,
    work: Workspace,
    out: torch.Tensor,
    changed: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> None:
    """Write a token for each of the plan's rows: out int64 [2, >= rows], tokens and whether they are valid (0 or 1).

    logits: float32 or float16 [., V], rows contiguous, stride(0) free, not changed; columns from work.vocab on are
    never sampled. changed: float32 [>= plan.ruled, >= vocab] scratch, counts: int16 [., >= vocab] token counts, updated
    with the tokens; both needed only by plans with rules. masks: int32 [., >= vocab / 32], which tokens rows with
    ALLOW below 0 may sample, needed by these. A row is not valid, and its token 0, where its largest logit
    is nan or infinite. Rows of kind 0 are left alone. On the current stream; nothing waits for the device.

    Raises ValueError for tensors that do not fit. CPU tensors are served by the reference, CUDA tensors never.
    """
    check_logits(logits, work.vocab)
    if plan.rows > work.rows or plan.rows > out.shape[1]:
        raise ValueError(f"sampling: {plan.rows} rows, but the workspace holds {work.rows} and out {out.shape[1]}")
    if (plan.ruled and changed is None) or (plan.counted and counts is None):
        raise ValueError("sampling: rows with rules need `changed`, and rows with penalties `counts`")
    if not plan.rows:
        return
    if not runs_kernels(logits):
        sample_rows_ref(logits, inputs.rows[: plan.rows], inputs.entries, counts, work.vocab, out, masks)
        return
    sources = _Sources.of(logits, changed, counts, masks, work)
    if plan.ruled:
        _change(sources, inputs, plan, work)
    _finish(sources, inputs, plan, work, out)
    if plan.counted:
        count_tokens[(1,)](inputs.rows, out, sources.counts, sources.strides[2], plan.rows, PART=128, num_warps=4)


@dataclass(frozen=True)
class _Sources:
    """Where logits come from; what a plan does not need is stood in for by a tensor of its dtype."""

    logits: torch.Tensor
    changed: torch.Tensor
    counts: torch.Tensor
    masks: torch.Tensor
    strides: tuple[int, int, int]

    @staticmethod
    def of(
        logits: torch.Tensor,
        changed: torch.Tensor | None,
        counts: torch.Tensor | None,
        masks: torch.Tensor | None,
        work: Workspace,
    ) -> _Sources:
        changed = work.bmax if changed is None else changed
        counts = work.chosen.view(torch.int16) if counts is None else counts
        masks = work.chosen if masks is None else masks
        return _Sources(logits, changed, counts, masks, (logits.stride(0), changed.stride(0), counts.stride(0)))


def _change(of: _Sources, inputs: Inputs, plan: Plan, work: Workspace) -> None:
    """The rows with bans, biases or masks, copied to `changed`."""
    block, vocab = work.shape.block, work.vocab
    strides = (*of.strides, of.masks.stride(0))
    # no fused multiply-adds: the reference rounds after each step, and equal logits are to stay equal
    change_rows[(work.blocks, plan.ruled)](
        of.logits, inputs.rows, inputs.ruled, of.counts, of.masks, of.changed, *strides, vocab, BLOCK=block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if plan.entries:
        change_entries[(plan.ruled,)](
            of.logits, inputs.rows, inputs.ruled, inputs.entries, of.counts, of.masks, of.changed, *strides, vocab,
            BLOCK=block, PART=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _finish(of: _Sources, inputs: Inputs, plan: Plan, work: Workspace, out: torch.Tensor) -> None:
    """One read of the logits, then the tokens of each kind of row."""
    shape, warps, rows = work.shape, work.shape.warps, inputs.rows
    from_ = (of.logits, of.changed, of.counts, rows)
    nb, ng, vocab = work.blocks, work.groups, work.vocab
    common: dict[str, Any] = {"RULES": plan.ruled > 0 or plan.counted, "enable_fp_fusion": False}
    block_stats[(nb, plan.rows)](
        *from_, work.bmax, work.bsum, work.gmax, work.gsum, *of.strides, vocab, nb, ng, BLOCK=shape.block,
        GROUP=shape.group, SUMS=plan.draws, CUTS=plan.cuts, **common, num_warps=warps[0],
    )  # fmt: skip
    blocks = work.blocks_padded
    sizes = (*of.strides, out.stride(0), vocab, nb)
    if plan.plain:
        finish_plain[(plan.rows,)](
            *from_, work.bmax, work.bsum, out, *sizes, BLOCK=shape.block, NB=blocks, DRAWS=plan.draws, **common,
            num_warps=warps[1],
        )  # fmt: skip
    if plan.cuts:
        finish_cut[(plan.rows,)](
            *from_, work.bmax, work.bsum, work.gmax, work.gsum, work.chosen, work.list, work.cut, work.left,
            work.state, out, *sizes, ng, GROUP=shape.group, NB=blocks, NG=triton.next_power_of_2(ng),
            CHUNK=shape.chunk, TILE=shape.tile, LIST=shape.list, **common, num_warps=warps[2],
        )  # fmt: skip
        if plan.wide:
            _widen(of, inputs, plan, work, out, common)
        finish_flat[(plan.rows,)](
            *from_, work.bmax, work.sums, work.list, work.cut, work.left, out, *sizes, NB=blocks,
            PIVOTS=shape.pivots, STEP=shape.step, STEPS=work.steps, LIST=shape.list, **common, num_warps=warps[4],
        )  # fmt: skip


def _widen(
    of: _Sources, inputs: Inputs, plan: Plan, work: Workspace, out: torch.Tensor, common: dict[str, Any]
) -> None:
    """Rows that finish_cut left: those with a list from it, the others by all blocks at once."""
    shape, nb = work.shape, work.blocks
    finish_list[(plan.rows,)](
        inputs.rows, work.bmax, work.bsum, work.list, work.cut, work.left, out, out.stride(0), nb,
        NB=work.blocks_padded, LIST=shape.list, num_warps=shape.warps[3],
    )  # fmt: skip
    from_ = (of.logits, of.changed, of.counts, inputs.rows, work.left, work.state)
    tallies, blocks = (work.tcount, work.tmass), work.blocks_padded
    for second in (False, True):
        tally_blocks[(nb, plan.rows)](
            *from_, *tallies, *of.strides, work.vocab, nb, SECOND=second, BLOCK=shape.block, PART=shape.part,
            PIVOTS=shape.rays, **common, num_warps=shape.warps[5],
        )  # fmt: skip
        choose_range[(1, plan.rows)](
            inputs.rows, work.left, work.state, *tallies, work.starts, nb, SECOND=second, NB=blocks,
            PIVOTS=shape.rays, num_warps=4,
        )  # fmt: skip
    gather_range[(nb, plan.rows)](
        *from_, work.starts, work.list, *of.strides, work.vocab, nb, BLOCK=shape.block, NB=blocks, LIST=shape.list,
        **common, num_warps=8,
    )  # fmt: skip
    finish_wide[(1, plan.rows)](
        *from_, work.tmass, work.starts, work.list, work.running, work.cut, out, *of.strides, out.stride(0),
        work.vocab, nb, BLOCK=shape.block, NB=blocks, PIVOTS=shape.rays, LIST=shape.list, **common,
        num_warps=shape.warps[6],
    )  # fmt: skip


def token_logprobs(
    logits: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor, vocab: int, top: int, shape: Shape | None = None
) -> torch.Tensor:
    """int32 [L, 2 + 2 top]: each line's logprob (float32 bits), rank, then `top` tokens and their logprobs' bits.

    logits: float32 or float16 [., V], raw. lines: float64 [L, 2], row of the logits and index into tokens, int64 [.].
    The distribution is over all V columns; ids from `vocab` on are not listed. Rank 1 has the largest logit; equal
    logits share a rank, and are listed in token order. top: 0 to MOST_TOP, at most vocab.
    """
    check_logits(logits, vocab)
    if not 0 <= top <= min(MOST_TOP, vocab):
        raise ValueError(f"sampling: top={top} is not allowed; give 0 to {min(MOST_TOP, vocab)}, or sort")
    count = lines.shape[0]
    out = torch.empty(count, 2 + 2 * top, dtype=torch.int32, device=logits.device)
    if not runs_kernels(logits):
        logprobs_ref(logits, lines, tokens, vocab, top, out)
        return out
    width = logits.shape[1]
    shape = shape or Shape()
    nb = triton.cdiv(width, shape.block)
    ng = nb * (shape.block // shape.group)
    device = logits.device
    floats = torch.empty(count * (2 * nb + ng), dtype=torch.float32, device=device)
    bmax, bsum, gmax = (floats[: count * nb], floats[count * nb : 2 * count * nb], floats[2 * count * nb :])
    ranks = torch.empty(count, nb, dtype=torch.int32, device=device)
    if count:
        raw_stats[(nb, count)](
            logits, lines, tokens, bmax, bsum, ranks, gmax, logits.stride(0), width, vocab, nb, ng,
            BLOCK=shape.block, GROUP=shape.group, TOP=top > 0, num_warps=4,
        )  # fmt: skip
        finish_logprobs[(count,)](
            logits, lines, tokens, bmax, bsum, ranks, gmax, out, logits.stride(0), out.stride(0), vocab, nb, ng, top,
            NB=triton.next_power_of_2(nb), NG=triton.next_power_of_2(ng), GROUP=shape.group, TOP=top > 0,
            num_warps=8,
        )  # fmt: skip
    return out

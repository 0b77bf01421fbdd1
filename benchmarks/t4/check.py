"""Is this device right? Kernels against their plain references, and a small model against the CPU's reference path."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 16


def run(device: str, *, quick: bool) -> list[dict]:
    """One row a check: name, ok, error, limit."""
    rows = [model(device)]
    if device == "cuda":
        rows += gemm(quick) + paged(quick)
    return rows


def _row(name: str, error: float, limit: float) -> dict:
    return {"name": name, "ok": math.isfinite(error) and error <= limit, "error": error, "limit": limit}


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def model(device: str) -> dict:
    """Logprobs of a random small model's prompt and output: whole prompts at once, or in chunks with a paged cache.

    On a CPU both run there, in float32; else the reference is the CPU and the device computes in float16.
    """
    from qengine import LLM, SamplingParams
    from qengine.random_model import write_random_model

    prompt = [(37 * i) % 500 for i in range(100)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    forced = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    common = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "swap_space": 0, "max_model_len": 256}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "tiny"
        write_random_model("tiny", target)
        with LLM(str(target), device="cpu", dtype="float32", **common) as llm:
            tokens = prompt + llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            wanted = _logprobs(llm.generate([tokens], forced, use_tqdm=False)[0])
        dtype = "float32" if device == "cpu" else "float16"
        with LLM(str(target), device=device, dtype=dtype, max_num_batched_tokens=16, max_num_seqs=4, **common) as llm:
            got = _logprobs(llm.generate([tokens], forced, use_tqdm=False)[0])
    error = float((torch.tensor(got) - torch.tensor(wanted)).abs().max())
    return _row(f"logprobs of a small model in chunks of 16 tokens, {dtype}", error, 1e-3 if device == "cpu" else 0.05)


def _logprobs(output) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]


def gemm(quick: bool) -> list[dict]:
    """The packed product at row counts that get different kernels, against the exact product."""
    from qengine.kernels.w4a16 import dequantize_ref, w4a16_linear
    from qengine.kernels.w4a16.tuning import random_weight

    rows = []
    for bits, group in ((4, 128),) if quick else ((4, 128), (4, 64), (8, 128), (4, 0)):
        weight = random_weight(1024, 2048, bits, group)
        plain = dequantize_ref(weight).double()
        for m in (1, 16, 300) if quick else (1, 7, 16, 33, 64, 300, 2048):
            x = torch.randn(m, 2048, device="cuda", dtype=torch.float16)
            out = w4a16_linear(x, weight)
            rows.append(
                _row(f"product, {bits} bits, group {group}, {m} rows", _relative(out, x.double() @ plain.T), 2e-3)
            )
    return rows


def paged(quick: bool) -> list[dict]:
    """Cache write, decode and prefill attention for every kind of cache that the card can have."""
    from qengine.kernels.paged_attn.cache import BlockLayout, KVPool, gather_kv
    from qengine.kernels.paged_attn.decode import paged_decode, paged_decode_ref
    from qengine.kernels.paged_attn.prefill import paged_prefill, paged_prefill_ref
    from qengine.kernels.paged_attn.write import write_kv, write_kv_ref

    rows, lengths = [], [1, 17, 200, 333]
    kinds = ["float16", "int8", "int4"] + (["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])
    for kind in kinds[: 2 if quick else None]:
        layout = BlockLayout(kind, KV_HEADS, SIZE, BLOCK)
        tables = torch.randperm(120).view(4, 30).int().cuda()
        pools = [KVPool.allocate(layout, 1, 120, "cuda") for _ in range(2)]
        caches = [pool.layer(0) for pool in pools]
        qkv = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * SIZE, device="cuda", dtype=torch.float16)
        slots = [int(tables[s, p // BLOCK]) * BLOCK + p % BLOCK for s, n in enumerate(lengths) for p in range(n)]
        slots = torch.tensor(slots, device="cuda")
        copies = [qkv.clone(), qkv.clone()]
        write_kv(copies[0], caches[0], slots, num_heads=HEADS)
        write_kv_ref(copies[1], caches[1], slots, num_heads=HEADS)
        pairs = [gather_kv(cache, tables[3], lengths[3]) for cache in caches]
        worst = max(_relative(a, b) for a, b in zip(*pairs, strict=True))
        rows.append(_row(f"cache write, {kind}", worst, 0.02 if kind == "int4" else 5e-3))
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        q = copies[0][:, : HEADS * SIZE].view(-1, HEADS, SIZE)
        starts = torch.tensor([0, 1, 18, 218, 551], dtype=torch.int32, device="cuda")
        out, wanted = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
        paged_prefill(q, caches[0], tables, lens, starts, out, max_query_len=333, scale=SIZE**-0.5)
        paged_prefill_ref(q, caches[0], tables, lens, starts, wanted, scale=SIZE**-0.5)
        rows.append(_row(f"prefill attention, {kind}", _relative(out, wanted), 5e-3))
        last = q[(starts[1:] - 1).long()].contiguous()
        one = torch.full_like(last, float("nan"))
        paged_decode(last, caches[0], tables, lens, one, max_seq_len=333, scale=SIZE**-0.5)
        exact = paged_decode_ref(last, caches[0], tables, lens, scale=SIZE**-0.5)
        rows.append(_row(f"decode attention, {kind}", _relative(one, exact), 5e-3))
    return rows

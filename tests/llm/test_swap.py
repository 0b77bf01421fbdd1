"""Preempted by swap, preempted by recomputation and never preempted: the same tokens, once each, from real models."""

import random

import pytest
from tiny_llm import reference_greedy, tiny_folder

from qengine import LLM, SamplingParams

KINDS = {
    "swap": {"swap_threshold": 0},
    "recompute": {"swap_space": 0},
    "whichever is cheaper": {},
    "little CPU memory": {"swap_threshold": 0, "swap_space": 1e-5},
}
PROMPTS = [[random.Random(i).randrange(3, 300) for _ in range(n)] for i, n in enumerate([1, 2, 5, 17, 40, 3, 33, 9])]


@pytest.fixture(scope="module")
def family():
    model, folder = tiny_folder("gemma2")
    return folder, [reference_greedy(model, p, 24, vocab=300) for p in PROMPTS]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:max_model_len")
def test_greedy_tokens_are_transformers_however_a_sequence_gets_its_cache_back(family, kind, caching):
    folder, expected = family
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    pool = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_batched_tokens": 16, "device": "cpu"}
    with LLM(folder, enable_prefix_caching=caching, **pool, **KINDS[kind]) as llm:
        for _ in range(2):  # the second time what was evicted may come from CPU memory
            results = llm.generate(PROMPTS, params)
            llm.engine.check_integrity()
            assert [r.outputs[0].token_ids for r in results] == expected
        stats = llm.engine.stats()
    assert stats.gpu_blocks_used == stats.cpu_blocks_used == 0
    assert stats.preemptions_swapped + stats.preemptions_recomputed > 0
    if kind == "swap":
        assert stats.preemptions_recomputed == 0
        assert stats.bytes_in == stats.blocks_in * llm_block_bytes(stats) > 0
        assert (stats.cpu_hit_tokens > 0) == caching
    if kind == "recompute":
        assert stats.preemptions_swapped == stats.blocks_out == stats.cpu_blocks == 0
    if kind == "little CPU memory":
        assert 0 < stats.cpu_blocks < 20


def llm_block_bytes(stats):
    return stats.bytes_out // stats.blocks_out


@pytest.mark.filterwarnings("ignore:max_model_len")
def test_several_sequences_of_a_request_are_swapped_with_their_shared_beginning():
    _, folder = tiny_folder("smollm2")
    params = SamplingParams(temperature=1.0, seed=3, n=6, max_tokens=20, ignore_eos=True)
    seen = []
    for settings in (
        {},
        {"num_gpu_blocks_override": 15, **KINDS["swap"]},
        {"num_gpu_blocks_override": 15, "swap_space": 0},
    ):
        with LLM(folder, block_size=4, device="cpu", **settings) as llm:
            result = llm.generate({"prompt_token_ids": list(range(5, 27))}, params)[0]
            seen.append([output.token_ids for output in result.outputs])
            llm.engine.check_integrity()
            assert (llm.engine.scheduler.num_preemptions > 0) == bool(settings)
    assert seen[0] == seen[1] == seen[2]


def test_smollm2_with_20_blocks(smollm2):
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 1, 2, 3, 5, 8,", "Water " * 9]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens, stats = {}, {}
    for kind, blocks, settings in (
        ("never", 200, {}),
        ("swap", 20, KINDS["swap"]),
        ("recompute", 20, KINDS["recompute"]),
    ):
        pool = {"num_gpu_blocks_override": blocks, "block_size": 8, "max_model_len": 128}
        with LLM(smollm2, dtype="float32", device="cpu", **pool, **settings) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            stats[kind] = llm.engine.stats()
        tokens[kind] = [result.outputs[0].token_ids for result in results]
        assert all(len(ids) == 40 for ids in tokens[kind])
        assert stats[kind].gpu_blocks_used == stats[kind].cpu_blocks_used == 0
    assert tokens["never"] == tokens["swap"] == tokens["recompute"]
    assert stats["never"].preemptions_swapped == stats["never"].preemptions_recomputed == 0
    assert stats["swap"].preemptions_swapped > 0
    assert stats["recompute"].preemptions_recomputed > 0

"""Greedy tokens equal transformers', however the engine batches, chunks, shares and preempts."""

import random

import pytest
from tiny_llm import reference_greedy, tiny_folder
from tiny_models import tiny

from qengine import LLM, SamplingParams

FAMILIES = ["smollm2", "llama3", "qwen2-sliding", "gemma2"]
PROMPTS = [[random.Random(i).randrange(3, 300) for _ in range(n)] for i, n in enumerate([1, 2, 5, 17, 40, 3, 33, 9])]
SETTINGS = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 7, "block_size": 4},
    "tiny pool": {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 1},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    model, folder = tiny_folder(request.param)
    return folder, [reference_greedy(model, p, 24, vocab=300) for p in PROMPTS]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:max_model_len")
def test_greedy_tokens_are_transformers(family, name):
    folder, expected = family
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(folder, **SETTINGS[name]) as llm:
        for _ in range(2):  # the second time from the prefix cache
            results = llm.generate(PROMPTS, params)
            llm.engine.check_integrity()
            assert [r.outputs[0].token_ids for r in results] == expected
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
        if name == "tiny pool":
            assert llm.engine.scheduler.num_preemptions > 0
        if name == "chunked":
            assert llm.engine.blocks.stats.hit_tokens > 0


@pytest.mark.filterwarnings("ignore:max_model_len")
def test_sampled_tokens_do_not_depend_on_batch_pool_or_chunks():
    _, folder = tiny_folder()
    params = [
        SamplingParams(temperature=1.2, top_p=0.95, seed=i, max_tokens=20, n=1 + i % 3, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    seen = []
    for setting in SETTINGS.values():
        with LLM(folder, **setting) as llm:
            results = llm.generate(PROMPTS, params)
            seen.append([[o.token_ids for o in r.outputs] for r in results])
    assert all(s == seen[0] for s in seen[1:])
    for sequences in seen[0]:
        assert len({tuple(s) for s in sequences}) == len(sequences), "n sequences of a seed differ"


def test_longrope_sequence_that_grows_over_its_switch_equals_transformers():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 6,
        "long_factor": [3.0 + i for i in range(6)],
        "original_max_position_embeddings": 24,
    }
    model, folder = tiny("phi3", sliding_window=None, original_max_position_embeddings=24, rope_parameters=rope)
    prompts = [list(range(10, 30)), list(range(40, 63)), list(range(5, 50)), [7, 8]]
    settings = {"skip_tokenizer_init": True, "block_size": 4, "max_num_batched_tokens": 9}
    with pytest.warns(UserWarning, match="prefix caching is off"):
        llm = LLM(folder, num_gpu_blocks_override=32, **settings)
    with llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        llm.engine.check_integrity()
    assert len({t for r in results for t in r.outputs[0].token_ids}) > 5
    for prompt, result in zip(prompts, results, strict=True):
        assert result.outputs[0].token_ids == reference_greedy(model, prompt, 30), len(prompt)

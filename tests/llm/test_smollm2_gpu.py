"""The demo's AWQ checkpoint on a GPU: its greedy tokens are the CPU's but for ties, and a quantized cache costs little.

Run again with TRITON_OVERRIDE_ARCH=sm75 for the code that Turing gets. The checkpoint is made by `qengine demo`;
where it is not in the cache folder (QENGINE_CACHE), the tests are skipped.
"""

import math

import pytest
import torch

from qengine import LLM, SamplingParams
from qengine.checkpoint import open_checkpoint
from qengine.convert.documents import EVALUATION, bundled_text
from qengine.demo_model import cache_dir
from qengine.layers.attention import DenseContext
from qengine.models import load_model

FOLDER = cache_dir() / "smollm2-135m-instruct-awq-int4"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="run `qengine demo` first"),
]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village",
    "1, 1, 2, 3, 5, 8,",
    "Die Würde des Menschen ist",
    "日本の首都は",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Water boils at 100 degrees Celsius because",
    "a",
]
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
TIE = 0.12
"""Logits closer than this, in float32, can change places in float16: three times the largest error seen here."""
OPTIONS = {"device": "cuda", "dtype": "float16", "max_model_len": 1024, "lm_head_dtype": "model"}


@pytest.fixture(scope="module")
def reference():
    return load_model(open_checkpoint(FOLDER), dtype=torch.float32, device="cpu")


@torch.inference_mode()
def _gaps(model, prompt, tokens):
    """How far each token's logit is under the largest, by the CPU, given the same tokens before it."""
    ids = torch.tensor(prompt + tokens)
    logits = model.logits(model.forward(ids, torch.arange(len(ids)), DenseContext(1, len(ids))))
    logits = logits[len(prompt) - 1 : -1]
    return logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_are_the_cpus_but_for_ties(reference, eager):
    with LLM(FOLDER, kv_cache_dtype="float16", enforce_eager=eager, **OPTIONS) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        alone = [llm.generate({"prompt_token_ids": r.prompt_token_ids}, PARAMS)[0] for r in together[:3]]
    gaps = torch.cat([_gaps(reference, r.prompt_token_ids, r.outputs[0].token_ids) for r in [*together, *alone]])
    assert gaps.max() < TIE, f"a token {gaps.max():.3f} under the best one is no tie"
    assert (gaps > 0).float().mean() < 0.02, "too many ties for errors of float16"


def test_small_pools_and_swapping_give_the_same_tokens():
    options = {**OPTIONS, "kv_cache_dtype": "float16", "max_model_len": 256, "enable_prefix_caching": False}
    results = []
    for pool in (
        {},
        {"num_gpu_blocks_override": 24, "swap_space": 0},
        {"num_gpu_blocks_override": 24, "swap_space": 1},
    ):
        with LLM(FOLDER, **options, **pool) as llm:
            results.append([r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS)])
            assert not pool or llm.engine.scheduler.num_preemptions > 0
            llm.engine.check_integrity()
    same = [a == b == c for a, b, c in zip(*results, strict=True)]
    assert sum(same) >= len(same) - 2, "batches differ from step to step, so ties may fall otherwise, but not often"


def test_perplexity_with_a_quantized_cache():
    text = bundled_text(EVALUATION)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for kind in ("float16", "int8", "int4"):
        with LLM(FOLDER, kv_cache_dtype=kind, max_num_batched_tokens=200, **OPTIONS) as llm:
            ids = llm.get_tokenizer().encode(text)[: 6 * 512]
            windows = [{"prompt_token_ids": ids[at : at + 512]} for at in range(0, len(ids), 512)]
            losses = []
            for result in llm.generate(windows, params):
                known = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
                losses += [-entry[token].logprob for token, entry in known]
        found[kind] = math.exp(sum(losses) / len(losses))
    print(found)
    assert abs(found["int8"] / found["float16"] - 1) < 0.003
    assert found["int4"] / found["float16"] - 1 < 0.03


def test_memory_comes_back():
    torch.cuda.synchronize()
    sizes = []
    for _ in range(3):
        with LLM(FOLDER, gpu_memory_limit=4, **OPTIONS) as llm:
            llm.generate(PROMPTS[:2], PARAMS)
            held = torch.cuda.memory_allocated()
        sizes.append(torch.cuda.memory_allocated())
        assert held > sizes[-1] + (1 << 30)
    assert sizes[-1] < (64 << 20), f"bytes left after each close: {sizes}"
    assert sizes[-1] <= sizes[0], f"bytes left after each close: {sizes}"

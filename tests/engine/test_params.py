import numpy as np
import pytest

from qengine.config import EngineConfig, all_defaults
from qengine.errors import ConfigError, RequestError
from qengine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x", "detokenize": False}, "detokenize"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {1: "x"}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"n": 10**9}, "n=1000000000 .* 1 to 16384"),
        ({"stop": 5}, "stop=5"),
        ({"stop": False}, "stop=False"),
        ({"bad_words": 5}, "bad_words=5"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"logit_bias": {5.7: 1}}, "logit_bias has the key 5.7"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output"),
    ],
)
def test_wrong_sampling_values_are_named(values, text):
    with pytest.raises(RequestError, match=text):
        SamplingParams(**values)


def test_numbers_of_numpy_are_taken_as_pythons():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        max_tokens=np.int32(7),
        seed=np.uint64(2**63),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(5): np.float32(1)},
    )
    assert params == SamplingParams(
        n=2, temperature=0.5, max_tokens=7, seed=2**63, stop_token_ids=[3, 4], logit_bias={5: 1.0}
    )
    assert {type(params.n), type(params.max_tokens), type(params.seed), type(params.stop_token_ids[0])} == {int}


def test_sampling_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens, params.min_tokens) == (1, 1.0, 1.0, 16, 0)
    assert (params.repetition_penalty, params.logprobs, params.ignore_eos, params.seed) == (1.0, None, False, None)


def test_a_changed_field_is_checked_again():
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(RequestError, match="top_p"):
        params.verify()


def test_bias_keys_may_be_text_and_values_are_clamped():
    assert SamplingParams(logit_bias={"5": 1000, 6: -1}).logit_bias == {5: 100.0, 6: -1.0}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
        ({"zzzzqqq": 1}, "known settings are"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"block_size": 3}, "block_size=3"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "int8"}, "dtype"),
        ({"quantization": "fp8"}, "quantization"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens"),
        ({"enforce_eager": "yes"}, "enforce_eager"),
        ({"device": "tpu"}, "device"),
        ({"swap_space": -1}, "swap_space"),
        ({"swap_threshold": -0.1}, "swap_threshold"),
        ({"swap_threshold": float("nan")}, "swap_threshold"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
        ({"priority_ageing": 0}, "priority_ageing"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"trust_remote_code": 1}, "trust_remote_code"),
        ({"generation_config": "other"}, "generation_config"),
    ],
)
def test_wrong_settings_are_refused_by_name(values, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig.from_kwargs(model="m", **values)


def test_settings_have_vllms_defaults():
    config = EngineConfig.from_kwargs(model="m", max_num_batched_tokens=None)
    assert (config.cache.block_size, config.cache.gpu_memory_utilization, config.cache.swap_space) == (16, 0.9, 4)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 2048)
    assert config.model.trust_remote_code is False
    assert all_defaults()["block_size"] == 16


def test_swapping_and_priorities_have_documented_defaults_and_odd_values():
    config = EngineConfig.from_kwargs(model="m")
    assert (config.cache.swap_space, config.cache.swap_threshold) == (4, 1.0)
    assert (config.scheduler.scheduling_policy, config.scheduler.priority_ageing) == ("fcfs", 60.0)
    odd = EngineConfig.from_kwargs(
        model="m", swap_space=0, swap_threshold=float("inf"), scheduling_policy="priority", priority_ageing=float("inf")
    )
    assert odd.cache.swap_threshold == odd.scheduler.priority_ageing == float("inf")
    assert EngineConfig.from_kwargs(model="m", swap_space=0.5, swap_threshold=0).cache.swap_space == 0.5


def test_dtype_names_are_brought_into_one_form():
    assert EngineConfig.from_kwargs(model="m", dtype="half").model.dtype == "float16"
    assert EngineConfig.from_kwargs(model="m", dtype="torch.bfloat16").model.dtype == "bfloat16"
    assert EngineConfig.from_kwargs(model="m", quantization="awq_marlin").model.quantization == "awq"

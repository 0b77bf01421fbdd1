"""Starting on a GPU: kernels come from the workers, the limit holds, and closing gives everything back."""

import json
import os
import subprocess
import sys

import pytest
import torch

from qengine import LLM, SamplingParams
from qengine.engine.gpu_memory import GIB, process_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTINGS = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "dtype": "float16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
}
CHILD = """
import json, sys
from triton import knobs
from qengine import LLM, SamplingParams
from qengine.engine.precompile import Precompiler

compiled, hits, watch = [], [], Precompiler.watch
knobs.compilation.listener = lambda *, src, cache_hit, **_: (hits if cache_hit else compiled).append(src.name)

def patiently(self, model):
    watch(self, model)
    assert self.finish(400)

Precompiler.watch = patiently
llm = LLM("random:llama-3.2-1b", **json.loads(sys.argv[1]))
first = list(compiled)
llm.generate([[5] * 128], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
llm.close()
print(json.dumps({"loading": first, "generating": compiled[len(first):], "found": len(hits)}))
"""


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8", "swap_space": 0}, {"enforce_eager": True}])
def test_a_start_compiles_nothing_that_the_workers_were_told_of(settings, tmp_path):
    task = json.dumps({**SETTINGS, **settings})
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, task], capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # it copies blocks for the swap, and is wanted before any request
    assert set(found["loading"]) <= {"move_kernel"}, found
    assert found["generating"] == []
    assert found["found"] > 15


def _serve(llm, requests=96):
    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(16 + 5 * i)]} for i in range(requests)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, top_p=0.9, max_tokens=40, ignore_eos=True)
        for i in range(requests)
    ]
    llm.generate(prompts, params, use_tqdm=False)


def test_the_limit_holds_and_everything_comes_back():
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)  # without a context NVML knows nothing of this process
    if process_bytes(device) is None:
        pytest.skip("NVML does not tell this process apart")
    limit, tokens, left = 6, [], []
    for _ in range(3):
        options = {**SETTINGS, "max_num_seqs": 256, "kv_cache_dtype": "float16", "swap_space": 0}
        with LLM("random:llama-3.2-1b", gpu_memory_limit=limit, **options) as llm:
            tokens.append(llm.engine.limits.pool_tokens)
            llm.engine.warm_up()
            _serve(llm)
            held = process_bytes(device)
            assert limit * GIB * 0.9 < held <= limit * GIB, f"{held / GIB:.3f} GiB"
        assert torch.cuda.memory_allocated() < 1 << 20
        assert torch.cuda.memory_reserved() <= 2 << 20
        left.append(process_bytes(device))
    assert left[-1] < 1.2 * GIB, "the CUDA context and kernels alone"
    assert left[2] <= left[1] + (4 << 20), f"each round leaves something: {left}"
    assert tokens[2] > 0.98 * tokens[0], f"each round leaves less room: {tokens}"

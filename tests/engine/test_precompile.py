"""Kernels compiled ahead: what a dry run finds, what the compile server makes of it, and that nobody waits for ever."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from ghost_card import DEVICE, ghost_card, ghost_decoder

from qengine.config import EngineConfig
from qengine.engine import compile_client
from qengine.engine.compile_client import CompileClient
from qengine.engine.dry_steps import precompiler
from qengine.engine.launch_recorder import KernelSpec, kernel_key, recorded_launches
from qengine.engine.precompile import MOST_WORKERS, WORKER_BYTES, count_workers, layer_kind
from qengine.engine.startup_steps import largest_steps
from qengine.engine.swap_setup import prefill_rate, timed_tokens
from qengine.errors import ConfigError
from qengine.kernels import turing
from qengine.kernels.fused.embedding import run_embedding
from qengine.kernels.w4a16 import ops
from qengine.models import Decoder, model_spec
from qengine.random_model import random_checkpoint

SPEC = model_spec(random_checkpoint("llama-3.2-1b", "cpu"))
UNFINISHED = """
import pytest, sys, time, torch
from ghost_card import DEVICE, ghost_card, ghost_decoder
from qengine.config import EngineConfig
from qengine.engine.dry_steps import precompiler
from qengine.engine.launch_recorder import recorded_launches
from qengine.models import model_spec
from qengine.random_model import random_checkpoint

def endless(model):
    while True:
        yield lambda: [torch.ones(9, 9, device="cuda") @ torch.ones(9, 9, device="cuda") for _ in range(500)]

spec = model_spec(random_checkpoint("llama-3.2-1b", "cpu"))
card = ghost_card(pytest.MonkeyPatch(), 90)
card.__enter__()
config = EngineConfig.from_kwargs(model="random:llama-3.2-1b", compile_workers=1)
ahead = precompiler(config, torch.float16, DEVICE, 512, spec.vocab_size)
ahead._client.add = lambda specs: None
with recorded_launches(DEVICE):
    ahead._seen.append(ghost_decoder(spec))
ahead._steps, ahead.missing = (endless, endless), 1
ahead.loaded()
time.sleep(0.5)
print(ahead._thread.is_alive())
"""
SMALL = ("fused.ids", "fused.embedding", "fused.rotary")
"""Kernels that take a fraction of a second to compile."""


def config(**settings):
    given = {"max_model_len": 512, "max_num_batched_tokens": 256, "compile_workers": 2, "max_num_seqs": 32}
    return EngineConfig.from_kwargs(model="random:llama-3.2-1b", **{**given, **settings})


def record(which, **settings):
    """The specializations of a precompiler's first or later steps."""
    ahead = precompiler(config(**settings), torch.float16, DEVICE, 512, SPEC.vocab_size)
    try:
        with recorded_launches(DEVICE) as found:
            for run in ahead._steps[which](ghost_decoder(SPEC)):
                run()
    finally:
        ahead.close()
    return found


def names(found):
    return {key[0].partition("kernels.")[2].rpartition(".")[0] for key in found}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("sm", [75, 80, 90])
def test_a_dry_run_finds_every_kernel_of_the_first_steps(sm, monkeypatch, cache):
    with ghost_card(monkeypatch, sm):
        before = (triton.runtime.jit.JITFunction.run, triton.runtime.jit.JITFunction._do_compile)
        spaces = dict(ops._workspaces)
        first, later = record(0), record(1)
        assert before == (triton.runtime.jit.JITFunction.run, triton.runtime.jit.JITFunction._do_compile)
        assert ops._workspaces == spaces, "a workspace without memory must not stay"
        again = record(0)
    steps = {"w4a16.gemm", "paged_attn.write_kernel", "paged_attn.decode_kernel", "fused.norm",
             "fused.sampling_kernel", *SMALL}  # fmt: skip
    assert steps | {"fused.sampling_cut_kernel", "fused.sampling_flat_kernel"} <= names(first)
    assert any(name.startswith("paged_attn.prefill") for name in names(first))
    assert steps | {"fused.sampling_wide_kernel"} <= names(later)
    assert first.keys() == again.keys(), "the same steps launch the same"
    assert {spec.target.arch for spec in first.values()} == {sm}
    assert all(spec.options["num_stages"] == 1 for key, spec in first.items() if sm == 75 and "gemm" in key[0])
    assert not any(cache.iterdir()), "a dry run compiles nothing"


def test_the_steps_that_an_engine_times_at_its_start_are_among_those_compiled_first(monkeypatch, cache):
    with ghost_card(monkeypatch, 90):
        ahead = precompiler(config(swap_space=1), torch.float16, DEVICE, 512, SPEC.vocab_size)
        steps = ahead._steps[0].args[0]()
        ahead.close()
    timed = []
    runner = SimpleNamespace(run=lambda items, copies: timed.append(items))
    prefill_rate(runner, timed_tokens("cuda", config(), 512), config().cache.block_size)

    def form(items):
        return [(item.start, item.end, item.scored, len(item.rows)) for item in items]

    assert {str(form(items)) for items in timed} <= {str(form(items)) for items in steps}


def test_what_a_layer_needs_as_the_last_one_and_before_others_is_found(monkeypatch, cache):
    with ghost_card(monkeypatch, 90):
        ahead = precompiler(config(), torch.float16, DEVICE, 512, SPEC.vocab_size)
        monkeypatch.setattr(ahead._client, "add", lambda specs: None)
        with recorded_launches(DEVICE):
            model = ghost_decoder(SPEC)
        ahead.watch(model)
        several = Decoder(SPEC, model.dtype, DEVICE, model.embedding, model.layers * 3, model.norm, model.head)
        with recorded_launches(DEVICE) as found:
            for run in ahead._steps[0](several):
                run()
        ahead.close()
    assert found
    assert found.keys() <= ahead.recorded.keys()


def test_a_process_that_ends_amid_a_dry_run_ends_as_it_should(cache):
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout == "True\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_the_largest_steps_have_all_that_may_sample_beside_prompts():
    steps = largest_steps(2048, 256, 1024, 16, 1024)
    sizes = [sum(item.end - item.start for item in items) for items in steps]
    drawn = [sum(len(item.rows) for item in items) for items in steps]
    assert sizes == [2048, 2048, 1024, 256]
    assert drawn == [256] * 4, "two of the largest in turn: one's logits beside the next"
    small = largest_steps(512, 256, 1024, 16, 1024)
    assert [sum(item.end - item.start for item in items) for items in small] == [512, 512, 256]
    for items in steps:
        assert len({item.seq_id for item in items}) == len(items)


def test_settings_change_what_is_found(monkeypatch, cache):
    with ghost_card(monkeypatch, 80):
        plain, quantized = record(0, kv_cache_dtype="float16"), record(0, kv_cache_dtype="int8")
        eager = record(0, enforce_eager=True)
        off = precompiler(config(compile_workers=0), torch.float16, DEVICE, 512, SPEC.vocab_size)
    decode = [{key for key in found if "paged_decode" in key[0]} for found in (plain, quantized)]
    assert all(decode)
    assert not decode[0] & decode[1]
    assert names(eager) <= names(plain)
    assert off is None


def small_kernels(found):
    return {key: spec for key, spec in found.items() if any(name in key[0] for name in SMALL)}


@pytest.mark.parametrize("sm", [75, 90])
def test_workers_fill_the_cache_that_launches_look_in(sm, monkeypatch, cache):
    with ghost_card(monkeypatch, sm):
        found = small_kernels(record(0))
        assert len(found) >= 3
        assert not any(spec.is_cached() for spec in found.values())
        client = CompileClient(2, turing.installed())
        client.add(found)
        assert client.finish(120)
        assert all(spec.is_cached() for spec in found.values())
        process = client._process
        client.seal()
        assert process.wait(20) == 0, "the server ends when its input does"
        client.close()


def test_a_kernel_that_no_worker_has_is_not_waited_for(monkeypatch, cache):
    with ghost_card(monkeypatch, 80):
        found = small_kernels(record(0))
    keys = list(found)
    client = CompileClient(1, turing.installed())
    monkeypatch.setattr(client, "_start", lambda: None)  # as if its imports took for ever
    client.add(found)
    start = time.monotonic()
    client.await_kernel(keys[-1])
    client.await_kernel(("unknown", "kernel"))
    assert time.monotonic() - start < 1
    assert [key for key, _ in client._waiting] == keys[:-1], "who needs it compiles it; no worker will"
    waiter = threading.Thread(target=client.finish)
    waiter.start()
    client.close()
    waiter.join(5)
    assert not waiter.is_alive()


def test_whatever_happens_to_the_server_nobody_waits(monkeypatch, cache, caplog):
    with ghost_card(monkeypatch, 80):
        found = small_kernels(record(0))
    client = CompileClient(1, turing.installed())
    client.add(found)
    client._process.kill()
    with caplog.at_level(logging.WARNING):
        for key in found:
            client.await_kernel(key)
        assert client.finish(5)
        client._process.wait(5)
        for _ in range(100):
            if caplog.records:
                break
            time.sleep(0.05)
    assert "ended with" in caplog.text
    client.add(found)  # nothing starts any more
    client.close()
    client.close()

    def refuse(*_, **__):
        raise OSError("no processes left")

    monkeypatch.setattr(compile_client.subprocess, "Popen", refuse)
    client = CompileClient(1, turing.installed())
    client.add(found)
    assert client.finish(5)
    assert "no processes left" in caplog.text


def test_an_error_of_a_worker_is_told_and_left_to_the_launch(monkeypatch, cache, caplog):
    with ghost_card(monkeypatch, 80):
        found = small_kernels(record(0))
        key, spec = next(iter(found.items()))
        spec.constexprs.clear()
        client = CompileClient(1, turing.installed())
        with caplog.at_level(logging.WARNING):
            client.add({key: spec})
            assert client.finish(60)
        client.close()
        assert key[0] in caplog.text
        assert "could not be compiled ahead" in caplog.text
        with pytest.raises(Exception, match=r"."):
            spec.compile()


def test_only_the_thread_that_records_is_kept_from_launching(monkeypatch, cache):
    seen = []

    def stock(self, key, *rest, **named):
        seen.append(kernel_key(self, key)[0])

    def launch():
        table = torch.empty(16, 8, dtype=torch.float16)
        run_embedding(torch.zeros(4, dtype=torch.int64), table, 1.0, torch.empty(4, 8, dtype=torch.float16))

    with ghost_card(monkeypatch, 80):
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", stock)
        with recorded_launches(DEVICE) as found:
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            assert not found
            assert [name.rpartition(".")[2] for name in seen] == ["embedding_kernel"]
            launch()
            assert [key[0] for key in found] == seen, "the same launch from this thread"
    assert len(seen) == 1


def test_workers_follow_processors_and_memory(monkeypatch):
    monkeypatch.setattr("qengine.engine.precompile.processors", lambda: 2)
    assert count_workers("auto", 12 << 30) == 2
    assert count_workers("auto", 2 * WORKER_BYTES) == 1
    assert count_workers("auto", WORKER_BYTES) == 0
    monkeypatch.setattr("qengine.engine.precompile.processors", lambda: 128)
    assert count_workers("auto", 1 << 40) == MOST_WORKERS
    assert (count_workers(0), count_workers(3)) == (0, 3)


@pytest.mark.parametrize("value", [-1, 1.5, True, "many", "3"])
def test_compile_workers_that_are_not_allowed(value):
    with pytest.raises(ConfigError, match="compile_workers"):
        EngineConfig.from_kwargs(model="m", compile_workers=value)


def test_layers_that_launch_the_same_are_of_one_kind(monkeypatch):
    with ghost_card(monkeypatch, 80), recorded_launches(DEVICE):
        one, other = ghost_decoder(SPEC).layers[0], ghost_decoder(SPEC).layers[0]
        assert layer_kind(one) == layer_kind(other)
        other._linears["o"]._impl.bias = torch.empty(SPEC.hidden_size, dtype=torch.float16, device=DEVICE)
        assert layer_kind(one) != layer_kind(other)


@pytest.mark.parametrize("warm", [False, True])
def test_only_what_the_cache_lacks_is_compiled(warm, monkeypatch, cache):
    if warm:
        (cache / "something").mkdir()
    monkeypatch.setattr(KernelSpec, "is_cached", lambda self: warm)
    monkeypatch.setattr(CompileClient, "_start", lambda self: None)
    with ghost_card(monkeypatch, 80):
        ahead = precompiler(config(), torch.float16, DEVICE, 512, SPEC.vocab_size)
        first, later = ahead._steps
        ahead._steps = (lambda _: first(ghost_decoder(SPEC)), lambda _: later(ghost_decoder(SPEC)))
        ahead._add(None, ahead._steps[0])
        assert len(ahead.recorded) > 15
        assert ahead.missing == len(ahead._client._waiting) == (0 if warm else len(ahead.recorded))
        ahead._seen.append(None)
        ahead.loaded()
        if ahead._thread is not None:
            ahead._thread.join()
        assert (ahead._thread is None) == warm, "a cache that has the first steps is taken to have the rest"
        assert len(ahead._client._waiting) == (0 if warm else len(ahead.recorded))
        ahead.close()


def test_a_dry_run_that_fails_is_told_and_loading_goes_on(monkeypatch, cache, caplog):
    with ghost_card(monkeypatch, 80):
        ahead = precompiler(config(), torch.float16, DEVICE, 512, SPEC.vocab_size)
        with caplog.at_level(logging.WARNING):
            ahead._add(None, ahead._steps[0])  # there is no model
        ahead.close()
    assert "cannot be compiled ahead" in caplog.text

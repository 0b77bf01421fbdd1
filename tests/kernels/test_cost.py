"""The cost model: physical limits, order, what it ships, how far it is from the H200's measurements."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import triton

from qengine.kernels.code_facts import (
    CostError,
    code_facts,
    compiled_facts,
    key,
    load_facts,
    normal,
    shipped_version,
)
from qengine.kernels.cost import (
    CARDS,
    MODELS,
    LinearShape,
    decode_step,
    dense_time,
    kernel_time,
    linear_time,
    prefill_step,
)
from qengine.kernels.launch import BUCKETS, SHARED, TABLES, Launch, pick

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_predicting_needs_neither_torch_nor_triton():
    code = (
        "import sys; from qengine.kernels.cost import *; decode_step(CARDS['T4'], MODELS['Llama-2-7B'], 1, 100);"
        "prefill_step(CARDS['RTX 3060'], MODELS['Qwen2.5-7B'], 700); assert not {'torch', 'triton'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", list(CARDS))
def test_no_prediction_beats_the_card(name):
    card = CARDS[name]
    for model in MODELS.values():
        weights = model.layers * sum(s.n * s.k * s.bits / 8 for s in model.linears) + model.head.n * model.head.k * 2
        step = decode_step(card, model, 1, 1)
        assert step.ms > weights / card.peak / 1e6
        macs = model.layers * sum(s.n * s.k for s in model.linears) * 1024
        assert prefill_step(card, model, 1024).ms > macs / ((card.wgmma or card.mma) * card.count * card.clock) / 1e6
        parts = step.linears_ms + step.attention_ms + step.head_ms + step.small_ms
        assert step.ms == pytest.approx(parts)
        assert step.tokens_per_s == pytest.approx(1000 / step.ms)


def test_more_work_takes_longer():
    card, model = CARDS["T4"], MODELS["Qwen2.5-7B"]
    assert decode_step(card, model, 1, 8000).ms > decode_step(card, model, 1, 100).ms
    assert decode_step(card, model, 8, 8000).ms > decode_step(card, model, 1, 8000).ms
    assert decode_step(card, model, 8, 8000, kv_bytes=1).ms < decode_step(card, model, 8, 8000).ms
    assert prefill_step(card, model, 512, context=4096).ms > prefill_step(card, model, 512).ms
    assert kernel_time(card, 1, 4096, 4096, bits=8).us > kernel_time(card, 1, 4096, 4096).us
    slower = replace(card, peak=160)
    assert decode_step(slower, model, 1, 100).ms > 1.4 * decode_step(card, model, 1, 100).ms
    assert linear_time(card, 1, LinearShape(4096, 4096, 16)).us == dense_time(card, 1, 4096, 4096).us


def test_a_users_launch_can_be_given():
    launch = Launch(bm=16, bn=32, split=2, warps=2, prefetch=1)
    found = kernel_time(CARDS["T4"], 9, 4096, 4096, launch=launch)
    assert found.launch == launch
    assert found.facts == compiled_facts(*normal(launch, 4, 128)[:1], 75, 4, 128)


def test_figures_of_every_launch_that_can_be_chosen_are_shipped():
    missing = []
    for sm, bits in product(SHARED, (4, 8)):
        for group, m, (n, k) in product(
            (0, 16, 32, 64, 128, 256), BUCKETS, ((4096, 4096), (22016, 4096), (3584, 18944))
        ):
            launch = pick(m, n, k, group, sm, SHARED[sm], bits)
            if launch.kernel == "gemm" and key(launch, sm, bits, group) not in load_facts():
                missing.append(key(launch, sm, bits, group))
    assert not missing, "run `python benchmarks/t4_model.py --write-code`"


def test_shipped_figures_are_those_of_the_compiler_that_made_them():
    if shipped_version() != triton.__version__:
        pytest.skip("another Triton made them")
    for sm, m in ((75, 1), (90, 512)):
        launch = pick(m, 12288, 4096, 128, sm, SHARED[sm])
        assert code_facts(launch, sm, 4, 128) == compiled_facts(normal(launch, 4, 128)[0], sm, 4, 128)


def test_a_launch_that_is_not_shipped_needs_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "qengine.kernels.w4a16.aot", None)
    with pytest.raises(CostError, match=r"sm75 w4 g128 .*install triton"):
        code_facts(Launch(bm=8, bn=16, warps=1), 75, 4, 128)


def test_the_model_is_near_the_h200s_measurements():
    errors = []
    for row in json.loads((TABLES / "sm90.json").read_text())["rows"]:
        if "us" in row:
            m = 1 if row["m"] == 8 else row["m"]
            launch = Launch(**row["launch"])
            us = kernel_time(CARDS["H200"], m, row["n"], row["k"], row["bits"], row["group"], launch).us
            errors.append(us / row["us"] - 1)
    assert len(errors) > 50
    assert statistics.median(map(abs, errors)) < 0.09
    assert max(map(abs, errors)) < 0.3


def test_dense_products_are_near_cublas_on_an_h200():
    rows = json.loads((RESULTS / "gemm.json").read_text())["rows"]
    errors = [
        dense_time(CARDS["H200"], r["m"], r["n"], r["k"]).us / r["cublas_fp16"] - 1
        for r in rows
        if r["m"] in (1, 16, 1024, 2048) and r["n"] * r["k"] > 30 << 20
    ]
    assert len(errors) > 8
    assert statistics.median(map(abs, errors)) < 0.12

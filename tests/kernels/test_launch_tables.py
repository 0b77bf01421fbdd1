"""The shipped launch tables: what they say, that `pick` follows it, and that every launch is within its budget."""

import json
from itertools import product

import pytest

from qengine.kernels import sass
from qengine.kernels.code_facts import compiled_facts, key, load_facts, normal, over_budget
from qengine.kernels.launch import BUCKETS, SHARED, TABLES, Launch, pick
from qengine.kernels.w4a16.aot import compile_launch

PREDICTED = (75, 80, 86, 89)


def table(sm):
    return json.loads((TABLES / f"sm{sm}.json").read_text())


@pytest.mark.parametrize("sm", PREDICTED)
def test_predictions_are_marked_and_say_how_they_were_made(sm):
    found = table(sm)
    assert found["predicted"] is True
    assert f"--write-table {sm}" in found["made_by"]
    assert all(row["predicted_us"] > 0 and "us" not in row for row in found["rows"])
    assert {row["m"] for row in found["rows"]} == set(BUCKETS)


def test_measurements_are_not_marked_as_predictions():
    found = table(90)
    assert "predicted" not in found
    assert not any("predicted_us" in row for row in found["rows"])


@pytest.mark.parametrize("sm", [*PREDICTED, 90])
def test_pick_gives_each_row_on_its_card(sm, monkeypatch, tmp_path):
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path))
    found = table(sm)
    for row in found["rows"]:
        launch = Launch(**row["launch"])
        got = pick(row["m"], row["n"], row["k"], row["group"], sm, SHARED[sm], row["bits"], found["count"])
        assert got == launch, row


@pytest.mark.parametrize("sm", PREDICTED)
def test_another_card_of_the_capability_takes_the_tile_with_a_split_of_its_own(sm):
    found = table(sm)
    row = next(r for r in found["rows"] if (r["m"], r["n"], r["k"]) == (16, 4096, 11008))
    launch = Launch(**row["launch"])
    got = pick(row["m"], row["n"], row["k"], 128, sm, SHARED[sm], 4, 5 * found["count"])
    assert (got.bm, got.bn, got.warps, got.stages) == (launch.bm, launch.bn, launch.warps, launch.stages)
    assert got.split > launch.split, "five times the multiprocessors need more parts"


@pytest.mark.parametrize("sm", PREDICTED)
def test_every_launch_is_within_its_budget(sm):
    wrong = {}
    shapes = {(row["n"], row["k"]) for row in table(sm)["rows"]}
    # on Turing for every kind of layer, on the others for what their tables are made for
    kinds = product((4, 8), (0, 128, 64, 32, 16)) if sm == 75 else [(4, 128)]
    for (n, k), m, (bits, group) in product(shapes, BUCKETS, list(kinds)):
        launch = pick(m, n, k, group, sm, SHARED[sm], bits)
        if launch.kernel == "gemm":
            name = key(launch, sm, bits, group)
            wrong[name] = over_budget(launch, load_facts()[name], sm, bits)
    assert len(wrong) >= 10
    assert {name: reason for name, reason in wrong.items() if reason} == {}


@pytest.mark.parametrize("sm", [75, 90])
def test_gating_in_the_kernel_leaves_no_register_on_the_stack(sm):
    for m in (1, 64, 512) if sm == 75 else (16, 256):
        launch = pick(m, 22016, 4096, 128, sm, SHARED[sm])
        code = sass.read(compile_launch(launch, sm, 4, 128, activation="silu").asm["cubin"])
        assert code.stack == 0, launch


def test_a_budget_can_be_broken():
    launch = Launch(bm=8, bn=32, warps=2, prefetch=1)
    facts = load_facts()[key(launch, 75, 4, 128)]
    assert over_budget(launch, facts, 75, 4) is None
    for change, reason in (
        ({"stack": 8}, "stack"),
        ({"shared": 70000}, "shared memory"),
        ({"tensor": 0}, "tensor-core"),
        ({"instructions": 2 * facts.instructions}, "instructions a weight"),
    ):
        assert reason in over_budget(launch, type(facts)(**{**facts.__dict__, **change}), 75, 4)


@pytest.mark.slow
@pytest.mark.parametrize("sm", PREDICTED)
def test_every_row_compiles_ahead_of_time_within_its_budget(sm):
    kinds = {normal(Launch(**row["launch"]), 4, 128)[0] for row in table(sm)["rows"]}
    for launch in (kind for kind in kinds if kind.kernel == "gemm"):
        assert over_budget(launch, compiled_facts(launch, sm, 4, 128), sm, 4) is None, launch

"""Which launch serves a shape: pure, within the card's limits, from tables before the rule."""

import json

import pytest

from qengine.kernels import launch
from qengine.kernels.launch import SHARED, Launch, pick

SHAPES = [(12288, 4096), (4096, 11008), (576, 1536), (1536, 576), (3584, 18944), (8, 8), (152064, 3584)]


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_choice_fits_the_card(sm: int, bits: int) -> None:
    smem = SHARED.get(sm, 101376)
    for n, k in SHAPES:
        for m in (1, 8, 9, 16, 17, 64, 65, 500, 3000, 70000):
            for group in (0, 16, 32, 64, 128, 256):
                found = pick(m, n, k, group, sm, smem, bits)
                assert found == pick(m, n, k, group, sm, smem, bits)
                if found.kernel == "dequantize":
                    continue
                assert launch.shared_bytes(found, bits) <= smem
                assert 1 <= found.split <= max(1, -(-k // (512 // bits)))
                assert found.bn >= 16 * found.warps, "a warp would have no rows"
                assert found.scaled or not 0 < group < 512 // bits
                if sm == 75:
                    assert found.stages == 1
                    assert found.prefetch <= 2
                if sm != 90:
                    assert not found.pdl
                    assert not found.tma


def test_a_users_table_comes_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Launch(bm=8, bn=32, split=5, warps=2, prefetch=2)
    row = {"m": 8, "n": 4096, "k": 4096, "bits": 4, "group": 128, "launch": {**mine.__dict__}}
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "sm75x40.json").write_text(json.dumps({"count": 40, "rows": [row]}))
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path))
    launch.forget_tables()
    try:
        assert pick(3, 4096, 4096, 128, 75, 65536) == mine
        near = pick(3, 4608, 4096, 128, 75, 65536)
        assert (near.bn, near.warps) == (32, 2), "a near shape takes the tile"
        assert pick(3, 22016, 4096, 128, 75, 65536).bn == 128, "a far one does not"
        assert pick(3, 4096, 4096, 32, 75, 65536).bn == 128, "nor do smaller groups"
        assert pick(3, 4096, 4096, 128, 75, 65536, sm_count=30).bn == 128, "nor does another card"
    finally:
        launch.forget_tables()


def test_a_row_between_the_buckets_serves_what_it_holds(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*sizes: int, split: int) -> list[dict]:
        shape = {"n": 4096, "k": 4096, "bits": 4, "group": 128}
        return [{"m": m, **shape, "launch": Launch(bm=64, bn=64, warps=4, split=split + m).__dict__} for m in sizes]

    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "TABLES", tmp_path)
    (tmp_path / "sm75.json").write_text(json.dumps({"count": 40, "rows": rows(48, 64, 128, split=-47)}))
    launch.forget_tables()
    try:
        assert [pick(m, 4096, 4096, 128, 75, 65536).split for m in (33, 48, 49, 64)] == [1, 1, 17, 17]
        assert pick(32, 4096, 4096, 128, 75, 65536).bm == 32, "rows of another bucket are for the rule"
        (tmp_path / "cache" / "launch").mkdir(parents=True)
        mine = {"count": 40, "rows": rows(64, split=-44)}
        (tmp_path / "cache" / "launch" / "sm75x40.json").write_text(json.dumps(mine))
        launch.forget_tables()
        assert pick(40, 4096, 4096, 128, 75, 65536).split == 20, "what the user measured comes before a finer row"
    finally:
        launch.forget_tables()


def test_splits_fill_the_card_in_whole_rounds() -> None:
    assert launch.split_for(1, 4096, 4096, 8, 64, 128, 512) == 8
    assert launch.split_for(512, 22016, 4096, 64, 128, 128, 80) == 1
    assert launch.split_for(1, 64, 128, 8, 64, 128, 512) == 1


def test_shipped_tables_name_real_launches() -> None:
    for path in launch.TABLES.glob("sm*.json"):
        for row in json.loads(path.read_text())["rows"]:
            Launch(**row["launch"])
            assert row["m"] in (*launch.BUCKETS, *launch.FINER)

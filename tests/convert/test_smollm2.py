import pytest
from cut_model import first_layers as cut

from qengine.convert.run import convert_checkpoint


@pytest.fixture(scope="module")
def first_layers(smollm2, tmp_path_factory):
    return cut(smollm2, tmp_path_factory.mktemp("smollm2") / "cut")


@pytest.mark.parametrize(("method", "limit"), [("awq", 0.75), ("gptq", 0.6)])
def test_real_layers_with_bundled_text(method, limit, first_layers, tmp_path):
    report = convert_checkpoint(first_layers, tmp_path / "out", method=method, sym=False, samples=4, seq_len=256)
    assert report.group_size == 64
    assert report.warnings == ["group size 64 instead of 128 for the whole model: 128 does not divide in_features 576"]
    assert report.out_bytes < report.source_bytes
    for kind, errors in report.errors_by_kind().items():
        assert errors["error"] < errors["rtn_error"], kind
    total = [sum(e[key] for e in report.errors_by_kind().values()) for key in ("error", "rtn_error")]
    assert total[0] < limit * total[1]
    assert max(report.layer_errors) < 0.02

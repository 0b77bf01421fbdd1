"""report.json, the page, and perplexity layer by layer."""

import json
from html.parser import HTMLParser

import pytest
import torch
from tiny_convert import convertible, quick_convert
from tiny_models import load

from qengine.checkpoint import open_checkpoint
from qengine.convert.evaluate import streamed_perplexity
from qengine.convert.html import plot
from qengine.perplexity import perplexity

VOID = {"meta", "line", "circle", "polyline", "br"}


class Page(HTMLParser):
    """Fails on tags that do not match, and collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.counts = [], [], {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen2"])
def test_streamed_perplexity_is_the_decoders(family):
    _, folder = convertible(family)
    tokens = torch.randint(3, 290, (3, 40), generator=torch.Generator().manual_seed(2))
    got = streamed_perplexity(open_checkpoint(folder), tokens, torch.device("cpu"))
    expected = perplexity(load(folder), tokens.reshape(-1).tolist(), 40).perplexity
    assert got == pytest.approx(expected, rel=1e-5)


def test_report_and_page(tmp_path, text_file):
    _, folder = convertible("llama3")
    report = quick_convert(folder, tmp_path / "out", text_file, method="best", evaluate=True, seed=3)
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["evaluation"]["after"] == report.evaluation.after
    assert saved["evaluation"]["windows"] == 24
    assert saved["out_bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert saved["command"].startswith(f"qengine convert {folder} --out DIR --method best --format awq-gemm --bits 4")
    assert "--seed 3" in saved["command"]
    assert set(saved["versions"]) == {"qengine", "torch"}
    assert len(saved["layer_errors"]) == len(saved["linears"]) // 7
    assert {record["method"] for record in saved["linears"]} <= {"awq", "gptq"}
    page = Page()
    text = (tmp_path / "out" / "report.html").read_text()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert page.counts["svg"] == 8
    assert f"{report.evaluation.before:.3f} before" in text


def test_plot_leaves_out_what_is_absent():
    assert plot([("a", [None, 0.0])], "layer") == ""
    drawn = plot([("a", [1e-3, None, 1e-2]), ("<b>", [1e-4, 1e-1, 1.0])], "layer")
    assert drawn.count("<circle") == 5
    assert "&lt;b&gt;" in drawn

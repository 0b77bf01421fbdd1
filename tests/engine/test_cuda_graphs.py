"""What surrounds a capture, without a GPU."""

import contextlib
import gc

import pytest

from qengine.engine.cuda_graphs import StepGraphs, uncollected


class Graph:
    """Notes when its capture ends and when it is destroyed."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def capture_end(self):
        self.log.append(f"{self.name} ends")
        raise RuntimeError("the capture was invalidated")

    def __del__(self):
        self.log.append(f"{self.name} goes")


def test_an_abandoned_graph_is_kept_until_the_next_failed_capture_is_over():
    log = []
    graphs = StepGraphs.__new__(StepGraphs)
    graphs._abandoned = None
    graphs._abandon(Graph("first", log))
    assert log == ["first ends"]
    graphs._abandon(Graph("second", log))
    assert log == ["first ends", "second ends", "first goes"]


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_within_and_all_is_as_before_afterwards(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(KeyError), uncollected():
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled(), "the outer one is still there"
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()

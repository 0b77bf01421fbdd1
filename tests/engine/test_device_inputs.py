"""How a step's numbers are laid out for a GPU, and how its results come back in the engine's order: all on the CPU."""

import random

import pytest
import torch

from qengine.engine.cuda_graphs import TOKENS, MixedShapes, batch_sizes
from qengine.engine.device_inputs import DeviceInputs, InputShape, InputStaging
from qengine.engine.gpu_runner import in_order
from qengine.engine.graph_limits import worth_capturing
from qengine.engine.sampler import SampleRow, Samples
from qengine.engine.step import StepItem
from qengine.kernels.fused.ids import resolve_ids
from qengine.sampling_params import SamplingParams

SIZE = 16


def item(seq_id, ids, start, end, table, rows=0):
    row = [SampleRow(SamplingParams(), ids, len(ids), 0, i) for i in range(rows)]
    return StepItem(seq_id, ids, start, end, table, row)


def fill(staging, items, shape, unknown=None):
    buffer = torch.full((shape.offsets()[-1],), 0xAB, dtype=torch.uint8)
    views = DeviceInputs.over(buffer, shape)
    staging._fill(items, views, unknown or {})
    return views


def test_every_number_is_where_the_kernels_look_for_it():
    ids = [list(range(100 * s, 100 * s + 60)) for s in range(3)]
    items = [
        item(0, ids[0][:40], 39, 40, [5, 9, 2], rows=1),
        item(1, ids[1][:1], 0, 1, [7], rows=1),
        item(2, ids[2], 10, 35, [4, 1, 8, 3]),
    ]
    views = fill(InputStaging(torch.device("cpu"), SIZE), items, InputShape(27, 3, 1, 4))
    assert views.ids.tolist() == [ids[0][39], ids[1][0], *ids[2][10:35]]
    assert views.positions.tolist() == [39, 0, *range(10, 35)]
    tables = {2: [4, 1, 8, 3]}
    assert views.slots.tolist() == [
        2 * SIZE + 7,
        7 * SIZE,
        *[tables[2][p // SIZE] * SIZE + p % SIZE for p in range(10, 35)],
    ]
    assert views.lengths.tolist() == [40, 1, *[60] * 25], "a prompt in chunks is as long as the whole of it"
    assert views.seq_lens.tolist() == [40, 1, 35]
    assert views.query_starts.tolist() == [2, 27]
    assert views.tables.tolist() == [[5, 9, 2, 0], [7, 0, 0, 0], [4, 1, 8, 3]]


def test_padding_of_a_graph_writes_nothing_and_reads_nothing():
    views = fill(InputStaging(torch.device("cpu"), SIZE), [item(0, [3], 0, 1, [6], 1)], InputShape(4, 4, 0, 2))
    assert views.slots.tolist() == [6 * SIZE, -1, -1, -1]
    assert views.seq_lens.tolist() == [1, 0, 0, 0]
    assert views.ids.tolist()[1:] == views.positions.tolist()[1:] == [0, 0, 0]


def test_tables_follow_the_engines_through_growth_copies_and_replacement():
    staging, rng = InputStaging(torch.device("cpu"), 4), random.Random(3)
    table, ids = [rng.randrange(99)], [1]
    for step in range(300):
        if len(ids) > 4 * len(table):
            table.append(rng.randrange(99))
        elif rng.random() < 0.1:
            table[-1] = rng.randrange(99)  # copied on write: only the block that is written can be
        elif rng.random() < 0.05:
            table = [rng.randrange(99) for _ in table]  # a sequence that came back has another list
        views = fill(staging, [item(0, ids, len(ids) - 1, len(ids), table, 1)], InputShape(1, 1, 0, len(table)))
        assert views.tables.tolist() == [table], step
        ids.append(step)


def test_tables_of_sequences_that_ended_do_not_pile_up():
    staging = InputStaging(torch.device("cpu"), SIZE)
    for first in range(0, 5000, 10):
        items = [item(seq_id, [1, 2], 1, 2, [seq_id % 7], 1) for seq_id in range(first, first + 20)]
        views = fill(staging, items, InputShape(20, 20, 0, 1))
        assert views.tables.flatten().tolist() == [seq_id % 7 for seq_id in range(first, first + 20)]
    assert len(staging._tables) < 200


def test_a_mixed_graph_has_rows_for_single_tokens_and_then_for_prefills():
    shapes = MixedShapes(max_rows=100, max_tokens=2048, blocks=4)
    items = [
        item(0, [7, 8], 1, 2, [3], rows=1),
        item(1, list(range(50)), 0, 30, [1, 2]),
        item(2, [5] * 40, 0, 40, [9, 8, 7], 1),
    ]
    shape = shapes.of(71, 1, 2)
    assert (shape.tokens, shape.sequences, shape.prefills) == (128, 16 + 16, 16)
    views = fill(InputStaging(torch.device("cpu"), SIZE), items, shape)
    assert views.query_starts.tolist() == [1, 31, *[71] * 15]
    assert views.seq_lens.tolist() == [2, *[0] * 15, 30, 40, *[0] * 14]
    assert views.tables[0].tolist() == [3, 0, 0, 0]
    assert views.tables[16:18].tolist() == [[1, 2, 0, 0], [9, 8, 7, 0]]
    assert views.lasts.tolist()[:2] == [0, 70], "rows of the logits are for the sequences that sample, in order"
    assert views.slots.tolist()[71:] == [-1] * 57
    assert views.slots.tolist()[0] == 3 * SIZE + 1


def test_a_mixed_graph_without_prompt_chunks_has_no_prefill_tokens():
    views = fill(
        InputStaging(torch.device("cpu"), SIZE), [item(0, [7, 8], 0, 1, [3])], MixedShapes(8, 64, 4).of(1, 1, 0)
    )
    assert set(views.query_starts.tolist()) == {1}
    assert views.seq_lens.tolist()[0] == 1


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 256), (1024, 16), (100, 4), (7, 7)])
def test_mixed_shapes_hold_their_steps(tokens, rows):
    shapes = MixedShapes(rows, tokens, 4)
    largest = shapes.largest
    most = min(tokens, TOKENS[-1])
    for count in range(1, most + 1):
        for singles in {0, min(rows, count - 1) // 2, min(rows, count)}:
            prefills = min(64, rows - singles, (count - singles) // 2)
            shape = shapes.of(count, singles, prefills)
            assert shape.tokens >= count
            assert shape.sequences - shape.prefills >= singles
            assert shape.prefills >= prefills
            assert shape.tokens >= shape.sequences - shape.prefills, "a row for a single token stands for a token"
            assert all(a <= b for a, b in zip(shape.offsets(), largest.offsets(), strict=True))
    assert shapes.of(most + 1, 1, 1) is None
    assert shapes.of(most, rows + 1, 1) is None
    assert shapes.of(most, 0, 65) is None


def test_usual_shapes_are_those_of_steps_with_few_prompts():
    shapes = MixedShapes(256, 2048, 4)
    usual = shapes.usual()
    assert usual[0].offsets()[-1] == max(shape.offsets()[-1] for shape in usual), "the largest takes its memory first"
    assert len(usual) == len(set(usual))
    for tokens in range(1, 1025):
        assert shapes.of(tokens, max(0, min(256, tokens - 2)), min(16, tokens // 2)) in usual
    assert shapes.of(1024, 0, 17) not in usual


def test_graphs_are_for_steps_that_are_done_before_the_host_could_launch_them():
    seven, half = 202_375_168, 14_909_440  # weights of a layer of Llama-2-7B and of Qwen2.5-0.5B
    t4, h200 = 0.7 * 512 * 1.6e9 * 40, 0.7 * 2048 * 1.6e9 * 132
    assert worth_capturing(seven, t4) == 128
    assert worth_capturing(half, t4) == TOKENS[-1]
    assert worth_capturing(seven, h200) == TOKENS[-1]
    assert worth_capturing(50 * seven, t4) == TOKENS[0]


def test_unknown_tokens_are_taken_from_the_step_before():
    items = [item(4, [1, 2, -1], 2, 3, [0], 1), item(6, [9, 8], 1, 2, [1], 1)]
    views = fill(InputStaging(torch.device("cpu"), SIZE), items, InputShape(2, 2, 0, 1), {4: 3})
    assert views.ids.tolist() == [-4, 8]
    assert resolve_ids(views.ids, torch.tensor([50, 51, 52, 53])).tolist() == [53, 8]


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("largest", [1, 2, 7, 16, 100, 256, 300])
def test_batch_sizes_reach_the_largest_and_waste_little(largest, tile):
    sizes = batch_sizes(largest, tile)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for rows in range(1, largest + 1):
        size = next(s for s in sizes if s >= rows)
        assert size < 2 * rows, rows
        assert size in (1, 2, 4, 8, 16, 32, 64, largest) or size % tile == 0, "a tile of a product is not full"


def test_samples_come_back_in_the_engines_order():
    items = [
        item(0, [1, 2], 0, 2, [0], 1),
        item(1, [1], 0, 1, [1], 2),
        item(2, [1, 2], 0, 1, [2]),
        item(3, [1], 0, 1, [3], 1),
    ]
    order = [1, 2, 3, 0]
    samples = Samples([10, 11, 30, 0], [True, True, False, True], [None, "a", None, "b"])
    got = in_order(samples, [items[i] for i in order], order)
    assert got.token_ids == [0, 10, 11, 30]
    assert got.valid == [True, True, True, False]
    assert got.logprobs == ["b", None, "a", None]

"""The paper's own examples, to the letter: Figure 8's table and queues, and the serial manner of one pair."""

from __future__ import annotations

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.scheduling.buffers import BufferPairs, BufferState, ExecutorState
from mlsys_dvabatch.scheduling.pipeline import Pipeline


def queues(pipeline: Pipeline) -> list[list[tuple[int, int, int]]]:
    return [[part.item for part in queue] for queue in pipeline.queues]


def test_figure_8():
    """New with 2 requests; stretched by 2 while executor 2 works; split in two after stage 3."""
    pipeline = Pipeline(num_stages=4, num_pairs=2)
    # (a)
    row = pipeline.new(["q0", "q1"], now=0.0)
    assert queues(pipeline) == [[(0, 0, 2)], [], [], []]
    assert pipeline.start(0).item == (0, 0, 2)
    pipeline.finish(0)
    assert (row.size, row.status_map) == (2, (2, 0, 0, 0))
    assert queues(pipeline) == [[], [(0, 0, 2)], [], []]
    # (b)
    assert pipeline.start(1).item == (0, 0, 2)
    pipeline.stretch(["q2", "q3"])
    assert (row.size, row.status_map) == (4, (2, 0, 0, 0))
    assert queues(pipeline) == [[(0, 2, 2)], [], [], []]
    pipeline.finish(1)
    assert row.status_map == (2, 2, 0, 0)
    assert queues(pipeline) == [[(0, 2, 2)], [], [], []]  # executor 2 pushes nothing: it only updates the table
    assert pipeline.start(0).item == (0, 2, 2)
    pipeline.finish(0)
    assert row.status_map == (4, 2, 0, 0)
    assert queues(pipeline) == [[], [(0, 2, 2)], [], []]  # all have completed stage 1, but it is not merged there
    assert pipeline.start(1).item == (0, 2, 2)
    pipeline.finish(1)
    assert row.status_map == (4, 4, 0, 0)
    assert queues(pipeline) == [[], [], [(0, 0, 4)], []]
    # (c)
    assert pipeline.start(2).item == (0, 0, 4)
    pushed = pipeline.finish(2, groups=[["q0", "q1"], ["q2", "q3"]])
    assert [part.item for part in pushed] == [(1, 0, 2), (2, 0, 2)]
    assert queues(pipeline)[3] == [(1, 0, 2), (2, 0, 2)]
    children = [pipeline.table[1], pipeline.table[2]]
    assert [child.status_map for child in children] == [(2, 2, 2, 0)] * 2
    assert not any(child.can_stretch for child in children)
    assert pipeline.stretchable() is None


def test_a_batch_that_has_not_started_grows():
    pipeline = Pipeline(num_stages=2)
    pipeline.new(["a"], now=0.0)
    pipeline.stretch(["b", "c"])
    assert queues(pipeline) == [[(0, 0, 3)], []]


def test_only_the_latest_batch_is_stretched():
    pipeline = Pipeline(num_stages=3)
    pipeline.new(["a"], now=0.0)
    pipeline.new(["b"], now=1.0)
    assert pipeline.stretchable().batch_id == 1


def test_a_batch_in_its_last_stage_is_not_stretched():
    pipeline = Pipeline(num_stages=1)
    pipeline.new(["a"], now=0.0)
    pipeline.start(0)
    assert pipeline.stretchable() is None


def test_a_hold_ends_when_those_who_catch_up_are_cancelled():
    pipeline = Pipeline(num_stages=3)
    pipeline.new(["a"], now=0.0)
    pipeline.start(0)
    pipeline.finish(0)
    pipeline.start(1)
    pipeline.stretch(["b"])
    pipeline.finish(1)
    assert queues(pipeline) == [[(0, 1, 1)], [], []]
    pipeline.cancel("b")
    assert queues(pipeline) == [[], [], [(0, 0, 1)]]


def test_a_cancelled_request_compacts_its_batch():
    pipeline = Pipeline(num_stages=2)
    pipeline.new(["a", "b", "c"], now=0.0)
    pipeline.start(0)
    pipeline.finish(0)
    pipeline.cancel("b")
    assert pipeline.start(1).requests == ("a", "c")


def test_recursive_split_runs_serially():
    pipeline = Pipeline(num_stages=3, num_pairs=2)
    pipeline.new(list("abcd"), now=0.0)
    pipeline.start(0)
    pipeline.finish(0, groups=["ab", "cd"])
    assert pipeline.start(1).requests == ("a", "b")
    pipeline.finish(1, groups=["a", "b"])
    assert not pipeline.can_start(1), "c and d wait until a and b have left"
    order = []
    while pipeline.table.rows:
        stage = next(stage for stage in (2, 1) if pipeline.can_start(stage))
        order.append("".join(pipeline.start(stage).requests))
        pipeline.finish(stage)
    assert order == ["a", "b", "cd", "cd"]


def test_one_pair_is_given_back_only_by_the_last_executor():
    """Figure 11 with one pair: all executors are inactive until the batch has left the last."""
    pairs = BufferPairs(num_stages=3, num_pairs=1)
    for stage in range(2):
        assert pairs.begin(stage, 0)
        assert pairs.buffers[stage][0] is BufferState.INREADING
        assert pairs.buffers[stage + 1][0] is BufferState.INWRITING
        pairs.finish(stage, 0, num_read=1 if stage else 0, num_written=1)
        assert pairs.executors[stage] is ExecutorState.INACTIVE
        assert pairs.free_pair() is None
    assert pairs.begin(2, 0)
    pairs.finish(2, 0, num_read=1, num_written=0)
    assert pairs.executors == [ExecutorState.ACTIVE] * 3
    assert pairs.free_pair() == 0


def test_two_pairs_are_a_software_pipeline():
    pairs = BufferPairs(num_stages=2, num_pairs=2)
    assert pairs.begin(0, 0)
    pairs.finish(0, 0, num_read=0, num_written=1)
    assert pairs.begin(1, 0)
    assert pairs.begin(0, 1), "the first executor goes on with the other pair"


def test_an_executor_waits_in_checking_for_its_pair():
    pairs = BufferPairs(num_stages=2, num_pairs=1)
    assert pairs.begin(0, 0)
    pairs.finish(0, 0, num_read=0, num_written=1)
    assert not pairs.begin(0, 0)
    assert pairs.executors[0] is ExecutorState.CHECKING
    assert pairs.begin(1, 0)
    pairs.finish(1, 0, num_read=1, num_written=0)
    assert pairs.begin(0, 0)


@pytest.mark.parametrize(("num_stages", "num_pairs"), [(0, 1), (1, 0)])
def test_bad_sizes_are_refused(num_stages: int, num_pairs: int):
    with pytest.raises(InvalidInputError, match="at least 1"):
        Pipeline(num_stages, num_pairs)

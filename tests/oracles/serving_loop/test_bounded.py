"""The serving loop under a part of all interleavings: each accepted request is told of once, and nothing waits forever.

All plans of one choice are run for the scenes in which a handler stops the loop; of two, and of the others, a sample.
"""

from __future__ import annotations

import pytest

from tests.oracles.serving_loop.scenes import DRIVES, Scene, explore, sampler, scenes


@pytest.mark.parametrize("drive", DRIVES)
def test_a_signal_or_a_switch_anywhere_where_a_handler_stops_the_loop(drive: str) -> None:
    assert explore(Scene(drive, "", "stop", "thread"), depth=1) > 50


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sample_of_all_scenes(depth: int) -> None:
    keep = sampler({1: 0.01, 2: 0.008}[depth], seed=depth)
    assert sum(explore(scene, depth, keep) for scene in scenes()) > 500

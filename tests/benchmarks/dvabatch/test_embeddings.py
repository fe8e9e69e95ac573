"""The race of embeddings: a peer that gives other vectors ends it, and missing peers are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_bench.dvabatch import embeddings
from mlsys_bench.dvabatch.embeddings import (
    INT8,
    OURS,
    Contestant,
    compare,
    contestants,
    nearest_kept,
    race,
)
from mlsys_core.errors import MlsysError

PEER = """
import json, sys
import numpy as np
print(json.dumps({"is_ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "arrivals" in asked:
        print(json.dumps({"latencies": [asked["batch_size"] / 1e3] * len(asked["texts"])}), flush=True)
        continue
    np.save(asked["out"], np.array([[len(text), float(sys.argv[1])] for text in asked["texts"]]))
    print(json.dumps({"seconds": abs(asked["batch_size"] - 33) / 100, "processor_s": 0.1}), flush=True)
"""


def peer(name: str, second: float) -> Any:
    return Contestant(name, [sys.executable, "-c", PEER, str(second)], {}).started()


def test_contestants_take_turns_and_are_compared():
    texts = ["a", "bbb", "cc"] * 8
    with peer(OURS, 1.0) as ours, peer("alike", 1.0) as alike, peer("other", -1.0) as other:
        figures = race([ours, alike], texts, rounds=2)
        assert figures["alike"]["batch_size"] == 32  # the fastest of those tried
        assert figures["alike"]["per_s"] == pytest.approx(24 / 0.01)
        assert figures["alike"]["rate_per_s"] == pytest.approx(1200)  # half of the best peer's
        assert figures["alike"]["p99_ms"] == pytest.approx(32)
        assert figures["alike"]["least_cosine"] == pytest.approx(1.0)
        with pytest.raises(MlsysError, match="other gives other vectors: a cosine of"):
            race([ours, other], texts, rounds=1)
    with pytest.raises(MlsysError, match=r"gives vectors \[2, 3\], expected \[2, 4\]"):
        compare("x", np.ones((2, 3)), np.ones((2, 4)))
    dead = Contestant("dead", [sys.executable, "-c", ""], {})
    with pytest.raises(MlsysError, match="without an answer"), dead.started():
        pass


def test_peers_that_are_not_installed_are_named(tmp_path: Path):
    entered, missing = contestants(tmp_path, 1, tmp_path / "no")
    assert [each.name for each in entered] == [OURS, INT8]
    assert entered[1].command == [*entered[0].command, "int8"]
    assert set(missing) == {*embeddings.PEERS, *embeddings.ABSENT}
    assert "install.sh embeddings" in missing["fastembed"]


def test_int8_may_differ_a_little_and_tells_how_much_of_a_search_stays():
    expected = np.random.default_rng(0).normal(size=(40, 16))
    near = expected + np.random.default_rng(1).normal(size=expected.shape) * 0.02
    assert 0.99 < compare(INT8, near, expected) < 0.99999
    with pytest.raises(MlsysError, match="gives other vectors"):
        compare(OURS, near, expected)
    coarse = expected + np.random.default_rng(1).normal(size=expected.shape) * 0.15
    assert 0.9 < compare(embeddings.INT8_PEERS[0], coarse, expected) < 0.99
    with pytest.raises(MlsysError, match="gives other vectors"):
        compare(INT8, coarse, expected)
    assert nearest_kept(expected, expected) == 1.0
    assert 0.8 < nearest_kept(near, expected) < 1.0
    turned = expected[np.random.default_rng(2).permutation(40)]
    assert nearest_kept(turned, expected) < 0.5

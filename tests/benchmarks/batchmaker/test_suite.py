"""The suites at their smallest, the figures' plan, and the voices' clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.lstm import StackedLSTMCell
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.replay import systems
from mlsys_batchmaker.replay.trace import poisson_arrivals, run
from mlsys_batchmaker.streams.model import CellStream, stream_of
from mlsys_bench.batchmaker import baselines, suite, trees, words, workloads
from mlsys_bench.batchmaker.suite import plan
from mlsys_bench.batchmaker.voice_virtual import VirtualStreams
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.models import find_entry
from rich.console import Console

QUICK = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)


@pytest.mark.skipif(find_entry("g2p-en").source.locate(settings().cache_dir) is None, reason="g2p-en is not here")
def test_words() -> None:
    data = words.run(QUICK).data
    assert list(data["latency_s"]) == [str(load) for load in words.LOADS]


def test_trees() -> None:
    cases = trees.run(QUICK, hidden=16).data["cases"]
    assert {"cellular", "per height", "ideal"} <= set(cases["trees of one shape"]["median"])


def stream() -> CellStream:
    torch.manual_seed(0)
    cell = make_cell("frame", StackedLSTMCell(8, 16, 1))
    return stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0")


@pytest.mark.parametrize("max_batch", [1, 64])
def test_every_frame_is_answered_after_it_came(max_batch: int) -> None:
    voices = [np.zeros((10, 8), dtype=np.float32)]
    system = VirtualStreams(stream(), 6, workers=2, max_batch=max_batch)
    found = system.live(voices, 0.32)
    assert len(system.latencies_s) == 6 * 10
    assert min(system.latencies_s) > 0
    assert not found["is_lost"]
    assert found["p50_s"] <= found["p90_s"] <= found["p99_s"]
    assert found["batch"] <= max_batch


def test_a_peak_counts_all_frames() -> None:
    system = VirtualStreams(stream(), 5, workers=2, max_batch=3)
    rate = system.peak([np.zeros((4, 8), dtype=np.float32)], 4)
    assert len(system.latencies_s) == 20
    assert rate == pytest.approx(20 / max(system.latencies_s), rel=0.05)


TINY = dataclasses.replace(suite.QUICK, hidden=8, num_requests=20, loads=(0.5,), vocabulary=20)


def test_all_sequence_cases_give_the_same():
    requests = workloads.sentences(20, kind="clip50")
    arrivals = poisson_arrivals(20, 1000.0, 0)
    runs = [run(name, make, requests, arrivals) for name, make in suite.lstm_cases(TINY, 8).items()]
    assert len(runs) == 5
    workloads.require_equal(runs)
    for each in runs:
        assert len(each.latencies_s) == 18
        assert all(latency > 0 for latency in each.latencies_s)
        total = np.add(each.queue_s, each.compute_s)
        np.testing.assert_allclose(total, each.latencies_s, rtol=1e-6)


def test_the_longest_sentences_fit_the_widest_batch():
    model = lstm_model(num_words=9, hidden_size=4, batch_sizes=(512,))
    found = baselines.lstm(model)()([{"words": np.arange(330) % 9} for _ in range(512)], 330)
    assert len(found) == 512
    np.testing.assert_array_equal(found[0], found[511])


def test_a_case_that_computes_something_else_is_found():
    requests = workloads.sentences(10, kind="fixed24")
    arrivals = poisson_arrivals(10, 1000.0, 0)
    good = suite.lstm_cases(TINY, 8)["bucketed"]
    other = systems.request_level(
        lambda: lambda batch, _: [np.zeros(8, dtype=np.float32) for _ in batch],
        max_batch=8,
        bucket_width=10,
        length=baselines.num_words,
    )
    with pytest.raises(MlsysError, match="wrong and good differ"):
        workloads.require_equal([run("good", good, requests, arrivals), run("wrong", other, requests, arrivals)])


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["13", "14", "15"])
def test_figures_run(figure: str):
    for _, step in plan(TINY, [figure]):
        shown = step()
        assert f"Figure {figure}" in shown.title
        assert shown.data


def test_an_unknown_figure():
    with pytest.raises(InvalidInputError, match="no figure 12"):
        plan(TINY, ["12"])


def test_trees_of_a_file(tmp_path: Path):
    file = tmp_path / "trees.txt"
    file.write_text("(3 (2 a) (2 b))\n(3 (2 (2 c) (2 a)) (2 d))\n(2 alone)\n")
    sizes = {len(request["words"]) for request in workloads.trees(30, file=file)}
    assert sizes == {2, 3}
    with pytest.raises(InvalidInputError, match="cannot be read"):
        workloads.trees(1, file=tmp_path / "none")


@pytest.mark.parametrize(("kind", "longest"), [("wmt", 330), ("fixed24", 24), ("clip50", 50), ("clip100", 100)])
def test_lengths(kind: str, longest: int):
    lengths = workloads.lengths_of(kind).sample(4000, np.random.default_rng(0))
    assert lengths.min() >= 1
    assert lengths.max() <= longest
    assert kind != "wmt" or abs(lengths.mean() - 24) < 1.5


def test_treebank_brackets():
    tree = workloads.parse_tree("(3 (2 It) (4 (4 (2 's) (4 lovely)) (2 .)))", {"It": 1, "'s": 2, "lovely": 3})
    assert tree["words"].tolist() == [1, 2, 3, 0]
    assert tree["children"].tolist() == [[1, 2], [4, 3], [0, 5]]
    assert workloads.parse_tree("(2 Yes)", {"Yes": 4})["words"].tolist() == [4]


@pytest.mark.parametrize("text", ["", "(3 (2 a)", "(3 (2 a) (2 b) (2 c))", "(2 a))"])
def test_no_trees(text: str):
    with pytest.raises(InvalidInputError, match="no binary tree"):
        workloads.parse_tree(text, {})

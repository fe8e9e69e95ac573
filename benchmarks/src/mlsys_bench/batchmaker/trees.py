"""The suite ``batchmaker-trees``: DyNet's automatic batching, per-height batching and, for one shape, the ideal graph.

All trees are there at once; a figure is the CPU time of a case for all of them, with planning, scheduling or building
graphs, one thread, in turns. All do equal work: each has a table of words' parts of a leaf's gates. States of the roots
are compared first. DyNet runs in its own environment (``benchmarks/peers/dynet/requirements.txt``).
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.tree import tree_model
from mlsys_batchmaker.replay import systems
from mlsys_batchmaker.replay.trace import Request
from mlsys_batchmaker.replay.trace import run as serve
from mlsys_core.errors import MlsysError
from mlsys_core.report import Section, Table

from mlsys_bench.batchmaker import baselines, workloads

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

PEER = Path(".peers/dynet/bin/python")
SCRIPT = Path(__file__).parents[3] / "peers" / "dynet" / "peer.py"
TOLERANCE = 1e-3  # of the roots' states


def run(context: BenchContext, *, trees: str = "", hidden: int = 512, count: int = 192, repeats: int = 7) -> Section:
    """Run all cases on parse trees and on trees of one shape.

    Args:
        context: The suite's context; quick has 16 trees and one repeat.
        trees: A file of parse trees in brackets, one a line; empty: random ones.
        hidden: Hidden size.
        count: Number of trees.
        repeats: Turns.

    Raises:
        MlsysError: two cases give different states.
    """
    count, repeats = (16, 1) if context.is_quick else (count, repeats)
    torch.set_num_threads(1)
    parsed = workloads.trees(count, file=Path(trees) if trees else None)
    found = {
        "parse trees": compare(parsed, hidden, repeats, identical=False),
        "trees of one shape": compare(workloads.identical_trees(count), hidden, repeats, identical=True),
    }
    rows = [
        [title, name, f"{np.median(rates):.0f}", f"{np.median(cases['cellular']) / np.median(rates):.2f}x"]
        for title, cases in found.items()
        for name, rates in cases.items()
    ]
    data = {
        "hidden": hidden,
        "cases": {
            title: {"trees_per_s": cases, "median": {name: float(np.median(each)) for name, each in cases.items()}}
            for title, cases in found.items()
        },
    }
    body: list[str | Table] = [Table(["", "case", "trees/s", "ours over it"], rows, f"{count} trees, h = {hidden}")]
    if not PEER.exists():
        body.append("DyNet is not installed: benchmarks/peers/dynet/requirements.txt")
    return Section("BatchMaker: trees", body, data=data)


def compare(requests: Sequence[Request], hidden: int, repeats: int, *, identical: bool) -> dict[str, list[float]]:
    """Return the trees a second of each case in each turn."""
    model = tree_model(num_words=workloads.NUM_WORDS, hidden_size=hidden)
    common: dict[str, Any] = {"max_batch": 64, "bucket_width": None, "pads": False}
    common["length"] = lambda request: 2 * len(request["words"]) - 1
    makes = {
        "cellular": systems.cellular(model, executor="chunk"),
        "per height": systems.request_level(baselines.tree_per_height(model), **common),
    }
    if identical:
        makes["ideal"] = systems.request_level(baselines.tree_ideal(model), **common)
    rates: dict[str, list[float]] = {name: [] for name in makes}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(model, requests, Path(folder)) if PEER.exists() else None
        for _ in range(repeats):
            runs = []
            for name, make in makes.items():
                model.forget_plans()  # trees are as new to each run as they are to DyNet
                runs.append(serve(name, make, requests, [0.0] * len(requests)))
                rates[name].append(runs[-1].throughput_rps)
            workloads.require_equal(runs)
            if peer is not None:
                peer.check(runs[0].outputs)
                rates.setdefault("DyNet", []).append(peer.trees_a_second(len(requests)))
        if peer is not None:
            peer.close()
    return rates


class Peer:
    """DyNet in its own environment; it reads weights and trees from a file, and computes all of them once a line."""

    def __init__(self, model: Model, requests: Sequence[Request], folder: Path) -> None:
        leaf, inner = (cell.module for cell in model.cells)
        assert isinstance(inner.gates, torch.nn.Linear)
        trees = np.empty(len(requests), dtype=object)
        trees[:] = [(request["words"], request["children"].tolist()) for request in requests]
        with torch.no_grad():
            table = leaf.gates(leaf.embedding.weight).numpy()  # type: ignore[union-attr,operator]
            left, right = (part.t().contiguous().numpy() for part in inner.gates.weight.chunk(2, dim=1))
            bias = inner.gates.bias.numpy()
        given, answers = folder / "given.npz", folder / "answers.npy"
        np.savez(given, table=table, left=left, right=right, bias=bias, trees=trees)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [str(PEER), str(SCRIPT), str(given), str(answers)]
        process: Any = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        self._process = process
        if process.stdout.readline().strip() != "ready":
            raise MlsysError(f"{PEER} does not run DyNet: install benchmarks/peers/dynet/requirements.txt there")
        self._answers = np.load(answers)

    def check(self, outputs: Any) -> None:
        """Raise MlsysError where DyNet's states differ."""
        expected = np.stack([outputs[number] for number in sorted(outputs)])
        if np.abs(self._answers[: len(expected)] - expected).max() > TOLERANCE:
            raise MlsysError("DyNet gives other states: times mean nothing")

    def trees_a_second(self, count: int) -> float:
        """Run all trees once and return the trees per second."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return count / float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)

"""Benchmark trees against DyNet's automatic batching, per-height batching and, for trees of one shape, the ideal graph.

Peak throughput: all trees are there at once; each contestant's CPU time for all of them, with planning, scheduling or
building graphs, one thread, taking turns. All do equal work: each has a table of words' parts of a leaf's gates.
States of the roots are compared first. DyNet runs in its own environment (``benchmarks/peers/dynet/requirements.txt``):

    python benchmarks/batchmaker/dynet_trees.py --trees FILE [--hidden 512] [--peer .peers/dynet/bin/python]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_batchmaker.bench import direct, systems, workloads
from mlsys_batchmaker.bench.replay import Request, require_equal, run
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.tree import tree_model
from mlsys_core.environment import describe_environment

ROOT = Path(__file__).parents[2]
REPEATS = 7


class Peer:
    """DyNet in its own environment."""

    def __init__(self, python: Path, model: Model, requests: Sequence[Request], folder: Path) -> None:
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
        command = [str(python), str(Path(__file__).with_name("dynet_peer.py")), str(given), str(answers)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{python} does not run DyNet: install benchmarks/peers/dynet/requirements.txt there")
        self.answers = np.load(answers)

    def trees_a_second(self, count: int) -> float:
        """Run all trees once and return the trees per second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return count / float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def contestants(model: Model, *, identical: bool) -> dict[str, systems.Make]:
    """Return all contestants but DyNet."""
    common: dict[str, Any] = {"max_batch": 64, "bucket_width": None, "pads": False}
    common["length"] = lambda request: 2 * len(request["words"]) - 1
    found = {
        "cellular": systems.cellular(model, executor="chunk"),
        "per height": systems.request_level(direct.tree_per_height(model), **common),
    }
    return {**found, "ideal": systems.request_level(direct.tree_ideal(model), **common)} if identical else found


def compare(title: str, requests: Sequence[Request], hidden: int, python: Path, *, identical: bool) -> dict[str, Any]:
    """Run all contestants and print their figures; return them."""
    model = tree_model(num_words=workloads.NUM_WORDS, hidden_size=hidden)
    makes = contestants(model, identical=identical)
    rates: dict[str, list[float]] = {name: [] for name in makes}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(python, model, requests, Path(folder)) if python.exists() else None
        for _ in range(REPEATS):
            runs = []
            for name, make in makes.items():
                model.forget_plans()  # trees are as new to each run as they are to DyNet
                runs.append(run(name, make, requests, [0.0] * len(requests)))
                rates[name].append(runs[-1].throughput_rps)
            require_equal(runs)
            if peer is not None:
                expected = np.stack([runs[0].outputs[number] for number in sorted(runs[0].outputs)])
                np.testing.assert_allclose(peer.answers[: len(expected)], expected, rtol=0, atol=1e-3)
                rates.setdefault("DyNet", []).append(peer.trees_a_second(len(requests)))
        if peer is not None:
            peer.close()
    print(f"\n{title}: {len(requests)} trees at once, h = {hidden}")
    middle = {name: float(np.median(each)) for name, each in rates.items()}
    ours = middle["cellular"]
    for name, each in rates.items():
        spread = f"({min(each):.0f} to {max(each):.0f})"
        print(f"  {name:12} {middle[name]:7.0f} trees/s   ours: {ours / middle[name]:.2f}x   {spread}")
    if peer is None:
        print(f"  DyNet is not installed in {python}")
    return {"trees_per_s": rates, "median": middle}


def main() -> int:
    """Print the tables, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, help="parse trees in brackets, one a line; else random trees")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--count", type=int, default=192)
    parser.add_argument("--peer", type=Path, default=ROOT / ".peers" / "dynet" / "bin" / "python")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: Mapping[str, tuple[Callable[[], Sequence[Request]], bool]] = {
        "parse trees": (lambda: workloads.trees(options.count, file=options.trees), False),
        "trees of one shape": (lambda: workloads.identical_trees(options.count), True),
    }
    found = {
        title: compare(title, make(), options.hidden, options.peer, identical=identical)
        for title, (make, identical) in cases.items()
    }
    if options.output is not None:
        report = {"hidden": options.hidden, "cases": found, "environment": describe_environment()}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

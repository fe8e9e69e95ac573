"""Run time of Algorithm 1 on large graphs: a random DAG, a wide one of cells, a chain. The bound is ten seconds.

python benchmarks/nimble/stream_assignment.py --nodes 10000
"""

from __future__ import annotations

import argparse
import random
import time

from mlsys_nimble.ir.graph import Edge, OperatorGraph
from mlsys_nimble.planning.streams import assign_streams
from mlsys_nimble.planning.sync import plan_events

LIMIT_S = 10.0


def random_dag(num_nodes: int, inputs: int, rng: random.Random) -> set[Edge]:
    """Build a graph in which each operator reads ``inputs`` of the hundred before it."""
    return {
        (producer, node)
        for node in range(1, num_nodes)
        for producer in rng.sample(range(max(0, node - 100), node), min(inputs, node, 100))
    }


def cells(num_nodes: int, width: int) -> set[Edge]:
    """Fork into ``width`` operators, join, and so on, as searched nets do."""
    edges: set[Edge] = set()
    for first in range(0, num_nodes - width - 1, width + 1):
        for branch in range(first + 1, first + width + 1):
            edges |= {(first, branch), (branch, first + width + 1)}
    return {(a, b) for a, b in edges if b < num_nodes}


def main() -> int:
    """Print a line for each graph; return 1 if one takes longer than ten seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    num_nodes = parser.parse_args().nodes
    rng = random.Random(0)
    graphs = {
        "random, 3 inputs": random_dag(num_nodes, 3, rng),
        "random, 10 inputs": random_dag(num_nodes, 10, rng),
        "cells of 15": cells(num_nodes, 15),
        "chain": {(node, node + 1) for node in range(num_nodes - 1)},
    }
    slowest_s = 0.0
    print(f"{'graph':20} {'edges':>8} {'degree':>7} {'streams':>8} {'syncs':>8} {'seconds':>8}")
    for name, edges in graphs.items():
        graph = OperatorGraph(tuple(f"op{node}" for node in range(num_nodes)), tuple(sorted(edges)))
        started = time.perf_counter()
        assignment = assign_streams(graph)
        events = plan_events(assignment)
        seconds = time.perf_counter() - started
        slowest_s = max(slowest_s, seconds)
        print(
            f"{name:20} {len(edges):8} {assignment.degree:7} {assignment.num_streams:8} {len(events):8} {seconds:8.2f}"
        )
    return int(slowest_s > LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())

"""Run time of Algorithm 1 on large graphs: a random DAG, a wide one of cells, a chain. The bound is ten seconds.

mlsys bench nimble-streams nodes=10000
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_nimble.ir.graph import Edge, OperatorGraph
from mlsys_nimble.planning.streams import assign_streams
from mlsys_nimble.planning.sync import plan_events

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

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


@dataclass(frozen=True, slots=True)
class Row:
    """One graph."""

    graph: str
    edges: int
    degree: int
    streams: int
    synchronisations: int
    seconds: float


def run(context: BenchContext, *, nodes: int = 10_000) -> Section:
    """Assign streams to graphs of ``nodes`` operators; the section has failed if one takes over ten seconds."""
    num_nodes = 200 if context.is_quick else nodes
    rng = random.Random(0)
    graphs = {
        "random, 3 inputs": random_dag(num_nodes, 3, rng),
        "random, 10 inputs": random_dag(num_nodes, 10, rng),
        "cells of 15": cells(num_nodes, 15),
        "chain": {(node, node + 1) for node in range(num_nodes - 1)},
    }
    rows = []
    for name, edges in graphs.items():
        graph = OperatorGraph(tuple(f"op{node}" for node in range(num_nodes)), tuple(sorted(edges)))
        started = time.perf_counter()
        assignment = assign_streams(graph)
        events = plan_events(assignment)
        seconds = time.perf_counter() - started
        rows.append(Row(name, len(edges), assignment.degree, assignment.num_streams, len(events), seconds))
    is_slow = any(row.seconds > LIMIT_S for row in rows)
    return rows_section("Nimble: Algorithm 1", rows, status="failed" if is_slow else "ok", nodes=num_nodes)

"""The schedule: all that was decided ahead of time, frozen, for replay, print and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlsys_core.graphs import Graph, new_graph

from mlsys_nimble.planning.layout import Layout
from mlsys_nimble.planning.planner import Assignment, Piece
from mlsys_nimble.planning.storage import Storage

NOTHING = Assignment((), 0.0)


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators that run natively in one go, and those that torch runs after them."""

    operators: tuple[int, ...]  # indices in the layout's program; a job of the assignment indexes this tuple
    then_torch: tuple[int, ...]  # run by torch after the segment, in order
    assignment: Assignment = NOTHING


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule that the executor replays."""

    layout: Layout
    storage: Storage
    segments: tuple[Segment, ...]
    seconds: dict[int, float]  # measured, of each native operator on one worker

    @property
    def num_tasks(self) -> int:
        """Return the number of native tasks of a replay."""
        return sum(len(pieces) for segment in self.segments for pieces in segment.assignment.lists)

    @property
    def num_waits(self) -> int:
        """Return the number of synchronisations between workers."""
        return sum(segment.assignment.num_waits for segment in self.segments)

    def to_networkx(self) -> Graph:
        """Return the operators that are run, with what was measured and decided.

        To the attributes of :meth:`mlsys_nimble.ir.program.Program.to_networkx` nodes add ``workers`` ("0", "0 1" of an
        operator cut in two, "torch") and ``seconds``, the measured time on one worker, where there is one; edges add
        ``synchronises``: a worker waits for another. What runs in place is left out: its readers read its source.
        """
        known = self.layout.program.to_networkx()
        names = [operator.name for operator in self.layout.program.operators]
        for index in sorted(self.layout.in_place):  # topological order; views are resolved by now
            view = names[index]
            for source, reader in product([*known.predecessors(view)], [*known.successors(view)]):
                before = known.edges[source, reader]["nbytes"] if known.has_edge(source, reader) else 0
                known.add_edge(source, reader, nbytes=before + known.edges[view, reader]["nbytes"])
            known.remove_node(view)
        title = "schedule; dashed: a worker waits for another"
        graph = new_graph(title, column="workers", color="kind", dashed="synchronises")
        graph.add_nodes_from(known.nodes(data=True))
        graph.add_edges_from(known.edges(data=True), synchronises=False)
        for segment in self.segments:
            run = [names[index] for index in segment.operators]
            workers: dict[str, list[str]] = {}
            for worker, pieces in enumerate(segment.assignment.lists):
                for piece in pieces:
                    workers.setdefault(run[piece.job], []).append(str(worker))
                    for other, count in piece.waits:
                        edge = run[segment.assignment.lists[other][count - 1].job], run[piece.job]
                        graph.edges[edge]["synchronises"] = True
            for name, which in workers.items():
                graph.nodes[name]["workers"] = " ".join(which)
            for index in segment.then_torch:
                graph.nodes[names[index]]["workers"] = "torch"
        for index, seconds in self.seconds.items():
            graph.nodes[names[index]]["seconds"] = float(seconds)
        return graph

    def record(self) -> dict[str, Any]:
        """Return the schedule as plain data for JSON: operators by name, offsets and strides in bytes, worker lists."""
        program, places = self.layout.program, self.layout.places
        outside = {*program.inputs, *program.outputs, *program.constants}
        values = {}
        for value, (type_, place) in enumerate(zip(program.values, places, strict=True)):
            if place.root < 0:
                continue
            offset = place.offset * type_.itemsize
            memory = "caller" if place.root in {*program.inputs, *program.outputs} else "constant"
            if place.root not in outside:
                memory, offset = "arena", offset + self.storage.offsets[place.root]
            values[f"%{value}"] = {
                "type": str(type_),
                "memory": memory,
                "offset": offset,
                "strides": [stride * type_.itemsize for stride in place.strides],
            }
        return {
            "arena_nbytes": self.storage.plan.peak_nbytes,
            "values": values,
            "operators": [
                {
                    "name": operator.name,
                    "kind": type(operator.kind).__name__,
                    "inputs": [f"%{value}" for value in operator.inputs],
                    "outputs": [f"%{value}" for value in operator.outputs],
                    "in_place": index in self.layout.in_place,
                    "seconds": self.seconds.get(index),
                }
                for index, operator in enumerate(program.operators)
            ],
            "stretches": [
                {
                    "workers": [
                        [self._piece(segment, piece) for piece in pieces] for pieces in segment.assignment.lists
                    ],
                    "then_torch": [program.operators[index].name for index in segment.then_torch],
                }
                for segment in self.segments
            ],
        }

    def _piece(self, segment: Segment, piece: Piece) -> dict[str, Any]:
        name = self.layout.program.operators[segment.operators[piece.job]].name
        waits = [{"worker": worker, "tasks_done": count} for worker, count in piece.waits]
        return {"operator": name, "part": piece.part, "of": piece.num_parts, "waits": waits}


def segments_of(
    dependencies: Sequence[Sequence[int]], in_torch: frozenset[int], in_place: frozenset[int]
) -> list[Segment]:
    """Cut a program into segments: every operator goes into the first that has all its inputs.

    Args:
        dependencies: Operators that each operator reads from; see :func:`mlsys_nimble.planning.storage.dependencies`.
        in_torch: Operators without a native kernel.
        in_place: Operators that need not run.
    """
    level: list[int] = []
    for index, needed in enumerate(dependencies):
        # Native operators read torch's results of segment n from segment n + 1 on, torch's own at once.
        after = max((level[other] + (other in in_torch and index not in in_torch) for other in needed), default=0)
        level.append(after)
    count = 1 + max((level[index] for index in range(len(level)) if index not in in_place), default=0)
    native: list[list[int]] = [[] for _ in range(count)]
    torch: list[list[int]] = [[] for _ in range(count)]
    for index, at in enumerate(level):
        if index not in in_place:
            (torch if index in in_torch else native)[at].append(index)
    return [Segment(tuple(a), tuple(b)) for a, b in zip(native, torch, strict=True)]

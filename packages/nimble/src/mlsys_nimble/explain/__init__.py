"""Explanation of a model's schedule: its graph, streams, passes and memory, as data to print or draw.

The model runs only once, in :func:`mlsys_nimble.capture.capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_nimble.ir.graph import OperatorGraph
from mlsys_nimble.ir.program import Program
from mlsys_nimble.planning.streams import StreamAssignment, SyncEvent, assign_streams, plan_events

if TYPE_CHECKING:
    from mlsys_core.graphs import Graph
    from mlsys_core.memory import MemoryPlan

    from mlsys_nimble.passes import PassReport


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Streams of a program's operators, by Algorithm 1."""

    assignment: StreamAssignment
    events: tuple[SyncEvent, ...]

    def counts(self) -> dict[str, int]:
        """Return the numbers of section 3.3, by name."""
        return {
            "operators": len(self.assignment.graph.names),
            "edges": len(self.assignment.graph.edges),
            "meg_edges": len(self.assignment.meg_edges),
            "matched_edges": len(self.assignment.matching),
            "degree_of_logical_concurrency": self.assignment.degree,
            "streams": self.assignment.num_streams,
            "synchronizations": len(self.events),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """Decisions about a model that need no measured times."""

    captured: GraphFacts  # the model's own operators, which the paper's table 3.1 counts
    optimised: GraphFacts  # after the passes
    passes: tuple[PassReport, ...]
    program: Program  # after the passes
    memory: MemoryPlan  # of the native executor's arena

    def to_networkx(self) -> Graph:
        """Return the operators that a call runs, after the passes, with their streams and the tensors that flow.

        See :meth:`mlsys_nimble.ir.program.Program.to_networkx` and
        :meth:`mlsys_nimble.planning.streams.StreamAssignment.to_networkx` for the attributes.
        """
        return self.optimised.assignment.to_networkx(self.program.to_networkx())

    def record(self) -> dict[str, Any]:
        """Return everything as JSON-able values: counts, passes, memory, and each operator with its stream."""
        assignment = self.optimised.assignment
        names = assignment.graph.names
        stream_of = dict(zip(names, assignment.stream_of, strict=True))
        return {
            "captured": self.captured.counts(),
            "optimised": self.optimised.counts(),
            "passes": [
                {"name": one.name, "before": one.num_operators_before, "after": one.num_operators_after}
                for one in self.passes
            ],
            "memory": {
                "peak_nbytes": self.memory.peak_nbytes,
                "lower_bound_nbytes": self.memory.lower_bound_nbytes,
                "naive_nbytes": self.memory.naive_nbytes,
            },
            "operators": [
                {
                    "name": operator.name,
                    "kind": str(operator.kind),
                    "inputs": list(operator.inputs),
                    "outputs": [f"%{value}: {self.program.values[value]}" for value in operator.outputs],
                    "stream": stream_of.get(operator.name),
                    "source": operator.source,
                }
                for operator in self.program.operators
            ],
            "synchronizations": [[names[event.producer], names[event.consumer]] for event in self.optimised.events],
        }


def graph_of_inputs(program: Program) -> OperatorGraph:
    """Return the graph of operators that depend on the call's inputs; those of constants alone run once."""
    known = set(program.inputs)
    new_index: dict[int, int] = {}  # by operator: its index among those kept
    for index, operator in enumerate(program.operators):
        if not known.isdisjoint(operator.inputs):
            known.update(operator.outputs)
            new_index[index] = len(new_index)
    graph = program.graph()
    return OperatorGraph(
        names=tuple(graph.names[index] for index in new_index),
        edges=tuple((new_index[a], new_index[b]) for a, b in graph.edges if a in new_index and b in new_index),
    )


def assign(program: Program) -> GraphFacts:
    """Assign streams and synchronisations to a program."""
    assignment = assign_streams(graph_of_inputs(program))
    return GraphFacts(assignment, plan_events(assignment))


def explain(
    model: Callable[..., Any], inputs: Sequence[Any], *, progress: Callable[[str], object] = str
) -> Explanation:
    """Capture a model and make all decisions that need no measured times.

    Args:
        model: Module or function, called as ``model(*inputs)``.
        inputs: Example inputs, of the shapes and dtypes to explain.
        progress: Function that is called with the name of each step as it begins.

    Raises:
        CaptureError: the model cannot be scheduled; the message names the operator and the line.
    """
    from mlsys_nimble.capture import capture
    from mlsys_nimble.passes import optimise
    from mlsys_nimble.planning.layout import lay_out
    from mlsys_nimble.planning.storage import ancestors, dependencies, plan_storage

    progress("capturing")
    program = capture(model, tuple(inputs)).program
    progress("assigning streams")
    captured = assign(program)
    progress("running passes")
    program, reports = optimise(program)
    optimised = assign(program)
    progress("planning memory")
    layout = lay_out(program)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    return Explanation(captured, optimised, reports, program, storage.plan)

"""Which operators of a pipeline run on the host: pure, over its graph."""

from __future__ import annotations

from mlsys_windtunnel.parse.graph import Kind, PipelineGraph


def host_operators(graph: PipelineGraph, fallbacks: set[str], lookups: set[str]) -> set[str]:
    """Return names of the operators that run on the host: fallbacks, and all that these or look-ups depend on."""
    producers = {operator.output.name: operator for operator in graph.operators}
    host: set[str] = set()
    pending = [producers[name] for name in fallbacks]
    pending += [
        producers[value.name] for name in lookups for value in producers[name].inputs if value.name in producers
    ]
    while pending:
        operator = pending.pop()
        if operator.name not in host:
            host.add(operator.name)
            pending += [producers[value.name] for value in operator.inputs if value.name in producers]
    if host or lookups or not _reads_all(graph):  # the raw table may hold text: numbers are picked out of it first
        on_host = {graph.input.name, *(producer for producer, made_by in producers.items() if made_by.name in host)}
        for operator in graph.operators:
            if operator.kind is Kind.SELECT and operator.inputs[0].name in on_host:
                host.add(operator.name)
                on_host.add(operator.output.name)
    return host


def _reads_all(graph: PipelineGraph) -> bool:
    """Return whether each column of the input is computed with; one that is not may hold anything."""
    if graph.input.width is None:
        return not any(operator.kind is Kind.SELECT for operator in graph.operators)
    indices = {graph.input.name: tuple(range(graph.input.width))}  # columns of the input in values that only pick some
    read: set[int] = set()
    for operator in graph.operators:
        for value in operator.inputs:
            if value.name not in indices:
                continue
            if operator.kind is Kind.SELECT:
                indices[operator.output.name] = tuple(indices[value.name][column] for column in operator.columns or ())
            else:
                read.update(indices[value.name])
    read.update(indices.get(graph.output.name, ()))
    return len(read) == graph.input.width

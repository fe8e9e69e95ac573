"""The cell graph of a request as a graph of networkx, for ``explain --graph`` and notebooks."""

from __future__ import annotations

from mlsys_core.graphs import Graph, new_graph

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.structure import expand


def drawn(layout: Layout, structure: bytes) -> Graph:
    """Return the cells of a structure, named by their numbers; see :meth:`.graph.CellGraph.to_networkx`.

    Raises:
        InvalidInputError: A wire comes from a node that there is not.
    """
    import networkx as nx

    cells, codes, asked = expand(layout, structure)
    specs = [layout.cells[number] for number in cells.tolist()]
    results = set(asked.tolist())
    graph = new_graph("cells of a request", color="cell")
    for node, spec in enumerate(specs):
        fed = list(zip(spec.inputs, codes[node].tolist(), strict=False))  # codes are padded to the widest cell
        graph.add_node(
            str(node),
            label=f"{spec.name} {node}",
            cell=spec.name,
            priority=spec.priority,
            constants=", ".join(port.name for port, code in fed if code < 0),
            is_result=node in results,
        )
        for port, code in fed:
            if code > 0:
                source, output = divmod(code - 1, layout.num_outputs)
                edge = str(source), str(node)
                known = graph.edges[edge] if graph.has_edge(*edge) else {"wires": "", "nbytes": 0}
                wire = f"{specs[source].outputs[output].name} -> {port.name}"
                wires = f"{known['wires']}, {wire}" if known["wires"] else wire
                graph.add_edge(*edge, wires=wires, nbytes=known["nbytes"] + port.nbytes)
    phases: dict[str, int] = {}
    for name in nx.topological_sort(graph):
        cell = graph.nodes[name]["cell"]
        before = graph.predecessors(name)
        phases[name] = max((phases[one] + (graph.nodes[one]["cell"] != cell) for one in before), default=0)
    nx.set_node_attributes(graph, phases, "phase")
    return graph

"""A page with the picture of a translation: operators of the source on the left, modules on the right."""

from __future__ import annotations

from mlsys_core.graphs import Graph, draw_graph, new_graph
from mlsys_core.plot import to_svg
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.parse.graph import PipelineGraph


def translation_graph(graph: PipelineGraph, module: WindTunnelModule) -> Graph:
    """Return the pipeline's and the network's graph, with an edge from each operator to what it became.

    Nodes are ``pipeline: NAME`` and ``network: NAME``, which ``form`` says too; ``becomes`` marks the edges between.
    """
    both = new_graph("", column="form", color="kind", dashed="becomes")
    for form, part in (("pipeline", graph.to_networkx()), ("network", module.network.to_networkx())):
        for name, attributes in part.nodes(data=True):
            both.add_node(f"{form}: {name}", form=form, **{"label": name} | attributes)
        for one, other, attributes in part.edges(data=True):
            both.add_edge(f"{form}: {one}", f"{form}: {other}", becomes=False, **attributes)
    for name, _ in [*module.network.frontier, *((wire.name, ()) for wire in module.network.wires)]:
        if f"pipeline: {name}" in both:
            both.add_edge(f"pipeline: {name}", f"network: {name}", becomes=True)
    return both


def picture(graph: PipelineGraph, module: WindTunnelModule) -> str:
    """Return a page of its own, without scripts or links.

    Args:
        graph: Graph of the source.
        module: Its translation, trained or not.
    """
    network = module.network
    total = sum(each.numel() for each in network.parameters())
    trained = sum(each.numel() for each in network.parameters() if each.requires_grad)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Translation</title>'
        "<style>body{font:14px system-ui,sans-serif;margin:2em;color:#222}</style>"
        f"<h1>From pipeline to network</h1><p>{len(graph.operators)} operators with {graph.size.num_parameters:,} "
        f"parameters became {len(network.wires)} modules with {total:,}, {trained:,} of them trained.</p>"
        f"{to_svg(draw_graph(translation_graph(graph, module)))}</html>\n"
    )

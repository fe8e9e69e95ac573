"""Explanations of models: the paper's degrees, counts, JSON that names every operator, graphs."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from mlsys_bench.nimble.papers import NETS, net
from mlsys_core.lazy import resolve
from mlsys_nimble.capture import capture
from mlsys_nimble.explain import Explanation, assign, explain, graph_of_inputs
from mlsys_nimble.ir.program import Program
from mlsys_nimble.nets import find_net

from tests.graph_checks import check_graph

# Size of the largest set of independent operators that depend on the input, as captured: "Deg." of table 3.1, but
# each of NASNet-A is one more (docs/nimble.md).
DEGREES = {"inception-v3": 6, "darts": 7, "amoebanet": 11, "nasnet-mobile": 13, "nasnet-large": 16}


def captured(name: str) -> Program:
    """On the meta device: shapes are all that a graph needs."""
    with torch.device("meta"):
        module, inputs = resolve(find_net(name, NETS).factory)(1)
        return capture(module.eval().requires_grad_(False), inputs).program


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", DEGREES)
def test_degrees_of_table_3_1(name: str):
    facts = assign(captured(name))
    assert facts.assignment.degree == DEGREES[name]
    counts = facts.counts()
    assert counts["synchronizations"] == counts["meg_edges"] - counts["matched_edges"]
    assert counts["streams"] == counts["operators"] - counts["matched_edges"]


def test_operators_of_constants_alone_are_not_counted():
    program = captured("resnet20-cifar")
    graph = graph_of_inputs(program)
    assert len(graph.names) < len(program.operators)  # batch norms' scales come from constants
    assert assign(program).assignment.degree == 2  # a block and its shortcut


@pytest.fixture(scope="module")
def found() -> Explanation:
    """The explanation of a real net."""
    module, inputs = net("resnet20-cifar")
    steps: list[str] = []
    made = explain(module, inputs, progress=steps.append)
    assert steps == ["capturing", "assigning streams", "running passes", "planning memory"]
    return made


def test_explanation_of_a_real_net(found: Explanation):
    record = json.loads(json.dumps(found.record()))
    assert record["captured"]["operators"] > record["optimised"]["operators"] >= 21  # convolutions and the linear
    assert record["passes"][-1]["after"] == len(record["operators"])
    assert {one["stream"] for one in record["operators"]} == set(range(record["optimised"]["streams"]))
    memory = record["memory"]
    assert memory["lower_bound_nbytes"] <= memory["peak_nbytes"] < memory["naive_nbytes"]
    assert any("Convolution" in one["kind"] for one in record["operators"])


def test_the_graph_has_streams_and_tensors(found: Explanation, tmp_path: Path):
    graph = found.to_networkx()
    check_graph(graph, tmp_path)
    assert list(graph) == [operator.name for operator in found.program.operators]
    counts = found.optimised.counts()
    assert len(set(nx.get_node_attributes(graph, "stream").values())) == counts["streams"]
    assert sum(nx.get_edge_attributes(graph, "synchronises").values()) == counts["synchronizations"]
    assert graph.number_of_edges() == counts["edges"]
    first, last = graph.nodes[next(iter(graph))], graph.nodes[list(graph)[-1]]
    assert (first["kind"], first["shape"], first["dtype"], first["nbytes"]) == (
        "Convolution",
        "1x16x32x32",
        "float32",
        16 * 32 * 32 * 4,
    )
    assert (last["shape"], last["nbytes"]) == ("1x10", 40)
    assert {data["nbytes"] for _, _, data in graph.edges(data=True)} <= {16 << 12, 32 << 10, 64 << 8, 64 << 2}
    assert "in forward" in first["source"]

"""Compiled plans against those made in Python, on graphs of all kinds."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.plan import (
    CellGraph,
    CellSpec,
    GraphPlan,
    Layout,
    Planner,
    Port,
    Wire,
    planner,
)
from mlsys_batchmaker.plan.planner import PlanMaker
from mlsys_batchmaker.plan.structure import CODES, pack_part, pack_structure
from mlsys_core.errors import InvalidInputError, KernelUnavailableError

from . import reference

pytestmark = pytest.mark.usefixtures("kernel_level")

H, WORD, C = Port("h", "float32", (2,)), Port("word", "int64"), Port("c", "float32", (2,))
A, B = Port("a", *H.signature), Port("b", *H.signature)
LAYOUT = Layout(
    [
        CellSpec("one", (WORD, H), (H,)),
        CellSpec("two", (WORD, A, B), (H, C)),
        CellSpec("three", (H,), (H, WORD), results=(1,)),
    ]
)


def structure(rng: np.random.Generator, count: int, *, is_chain: bool, must_connect: bool = True) -> bytes:
    """A structure: random wires that mostly fit, constants and zeros, in a random order of nodes."""
    cells = rng.integers(0, len(LAYOUT.cells), count)
    if is_chain:
        cells[:] = np.sort(cells)
    codes = np.zeros((count, LAYOUT.num_inputs), dtype=np.int64)
    num_constants = [0] * len(LAYOUT.banks)
    is_read = np.zeros(count, dtype=np.bool_)
    for node, cell in enumerate(cells.tolist()):
        for index in range(len(LAYOUT.cells[cell].inputs)):
            bank = LAYOUT.bank_of_input[cell][index]
            if rng.random() < 0.2:
                num_constants[bank] += 1
                codes[node, index] = -num_constants[bank]
            elif node and (is_chain or rng.random() < 0.7):
                source = node - 1 if is_chain else int(rng.integers(0, node))
                fits = np.flatnonzero(LAYOUT.output_banks[cells[source]] == bank)
                if len(fits) or rng.random() < 0.01:  # some do not fit
                    codes[node, index] = 1 + source * LAYOUT.num_outputs + (int(fits[0]) if len(fits) else 1)
                    is_read[source] = True
    results = np.flatnonzero(~is_read) if rng.random() < 0.8 else rng.integers(0, count, 2)
    if rng.random() < 0.5:
        old = rng.permutation(count)  # new number -> old number
        new = np.argsort(old)
        sources = (codes - 1) // LAYOUT.num_outputs
        moved = 1 + new[np.maximum(sources, 0)] * LAYOUT.num_outputs + (codes - 1) % LAYOUT.num_outputs
        codes, cells, results = np.where(codes > 0, moved, codes)[old], cells[old], new[results]
    if rng.random() < 0.1 and codes[0].max() > 0:  # some have a cycle
        codes[0] = np.where(codes[0] > 0, 1 + int(results[0]) * LAYOUT.num_outputs, codes[0])
    return packed(rng, cells, codes, rng.permutation(results), must_connect=must_connect)


def packed(
    rng: np.random.Generator, cells: np.ndarray, codes: np.ndarray, results: np.ndarray, *, must_connect: bool
) -> bytes:
    """Pack one part for each node, or for each run of nodes of one cell; wires are nodes or codes."""
    starts = [0, *(1 + np.flatnonzero(np.diff(cells))), len(cells)] if rng.random() < 0.5 else range(len(cells) + 1)
    parts = []
    for start, end in pairwise(starts):
        cell, rows = int(cells[start]), codes[start:end]
        wired = [(index, CODES, rows[:, index].tobytes()) for index in range(LAYOUT.num_inputs)]
        first: list[tuple[int, int]] = []
        for index in range(LAYOUT.num_inputs):
            nodes, outputs = np.divmod(rows[:, index] - 1, LAYOUT.num_outputs)
            if end - start == 1 and rows[0, index]:
                first.append((index, int(rows[0, index])))
            elif (rows[:, index] > 0).all() and len(set(outputs.tolist())) == 1:
                wired[index] = (index, int(outputs[0]), nodes.tobytes())
        parts.append(pack_part(cell, end - start, first=first, wired=[] if end - start == 1 else wired))
    ranges = [(int(node), int(node) + 1) for node in results]
    return pack_structure(len(cells), parts, ranges, must_connect=must_connect)


@settings(max_examples=300)
@given(count=st.integers(1, 24), seed=st.integers(0, 100_000), is_chain=st.booleans(), must_connect=st.booleans())
def test_as_in_python(count: int, seed: int, is_chain: bool, must_connect: bool):
    given_structure = structure(np.random.default_rng(seed), count, is_chain=is_chain, must_connect=must_connect)
    require_same(given_structure)


def require_same(given_structure: bytes) -> None:
    make = PlanMaker(LAYOUT).make
    try:
        expected = reference.make_plan(LAYOUT, given_structure)
    except InvalidInputError as error:
        with pytest.raises(InvalidInputError, match=re.escape(str(error))):
            make(given_structure)
        return
    require_equal(make(given_structure), expected)


@pytest.mark.parametrize("size", [1, 2, 7, 300])
def test_graphs_of_chains_and_wires(size: int):
    """Plan what ``chain`` and ``add_many`` ask for, in every form of a part; 300 nodes outgrow the room made first."""
    graph = CellGraph(LAYOUT)
    encoder = graph.chain("one", size, each={"word": range(size)}, carry={"h": "h"}, first={"h": [1.0, 2.0]})
    both = range(encoder.start, encoder.start + size)
    joined = graph.add_many("two", size, wires={"a": (both, "h"), "b": (list(both)[::-1], "h")}, each={"word": both})
    decoder = graph.chain("one", size, carry={"h": "h"}, first={"h": Wire(joined, "h"), "word": 3})
    says = graph.add("three", {"h": decoder.last("h")})
    graph.add_many("one", 2, wires={"h": ([joined, says], "h"), "word": ([says, says], "word")})
    for node in range(graph.num_nodes):
        graph.result(node)
    require_same(graph.structure())
    assert reference.make_plan(LAYOUT, graph.structure()).num_nodes == 3 * size + 3


@pytest.mark.parametrize("node", [-1, 5, 1 << 62])
def test_wires_from_nowhere(node: int):
    graph = CellGraph(LAYOUT)
    graph.result(graph.add_many("three", 2, wires={"h": ([node, 0], "h")}))
    with pytest.raises(InvalidInputError, match=rf"wired to node {node}: there are 2 nodes"):
        Planner(LAYOUT).plan(graph)
    require_same(graph.structure())
    with pytest.raises(InvalidInputError, match=rf"wired to node {node}: there are"):
        Planner(LAYOUT).plan(one_wire(node))


def one_wire(node: int) -> CellGraph:
    graph = CellGraph(LAYOUT)
    graph.result(graph.add("three", {"h": Wire(node, "h")}))
    return graph


def require_equal(got: GraphPlan, expected: GraphPlan) -> None:
    for name in ("nodes", "node_bases", "waiting", "subs", "sub_bases", "origin", "asked"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)
    for each in fields(GraphPlan):
        ours, theirs = getattr(got, each.name), getattr(expected, each.name)
        if each.name in ("more", "sub_more"):
            ours, theirs = sorted(ours), sorted(theirs)
        np.testing.assert_equal(ours, theirs, each.name)


def test_random_structures_are_of_all_kinds():
    """The generator above gives what it should: plans, and each way of being refused."""
    plans, refused = [], set()
    for seed in range(400):
        rng = np.random.default_rng(seed)
        try:
            given_structure = structure(rng, int(rng.integers(1, 24)), is_chain=bool(rng.integers(2)))
            plans.append(reference.make_plan(LAYOUT, given_structure))
        except InvalidInputError as error:
            refused |= {word for word in ("cycle", "disconnected", "no result", "takes rows") if word in str(error)}
    assert len(plans) > 50
    assert refused == {"cycle", "disconnected", "no result", "takes rows"}
    assert any(plan.more for plan in plans)
    assert any(plan.sub_more for plan in plans)
    assert any(kind.carry for plan in plans for kind in plan.kinds)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise KernelUnavailableError("no C++ compiler")

    monkeypatch.setattr(planner, "_load", missing)
    with pytest.raises(KernelUnavailableError, match="no C"):
        Planner(LAYOUT)

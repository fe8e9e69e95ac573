"""Compiled plans against those made in Python, on graphs of all kinds."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.plan import CellSpec, Layout, Plan, Planner, Port, compiled, planner, reference
from mlsys_batchmaker.plan.compiled import CompiledPlans
from mlsys_core.errors import InvalidInputError, MissingDependencyError

H, WORD, C = Port("h", "float32", (2,)), Port("word", "int64"), Port("c", "float32", (2,))
A, B = Port("a", *H.signature), Port("b", *H.signature)
LAYOUT = Layout(
    [
        CellSpec("one", (WORD, H), (H,)),
        CellSpec("two", (WORD, A, B), (H, C)),
        CellSpec("three", (H,), (H, WORD), results=(1,)),
    ]
)


def structure(rng: np.random.Generator, count: int, *, is_chain: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells, codes and results: random wires that mostly fit, constants and zeros, in a random order of nodes."""
    cells = rng.integers(0, len(LAYOUT.cells), count)
    if is_chain:
        cells[:] = np.sort(cells)
    codes = np.zeros((count, LAYOUT.num_inputs), dtype=np.int64)
    num_constants = [0] * len(LAYOUT.banks)
    is_read = np.zeros(count, dtype=np.bool_)
    for node, cell in enumerate(cells.tolist()):
        for place in range(len(LAYOUT.cells[cell].inputs)):
            bank = LAYOUT.bank_of_input[cell][place]
            if rng.random() < 0.2:
                num_constants[bank] += 1
                codes[node, place] = -num_constants[bank]
            elif node and (is_chain or rng.random() < 0.7):
                source = node - 1 if is_chain else int(rng.integers(0, node))
                fits = np.flatnonzero(LAYOUT.output_banks[cells[source]] == bank)
                if len(fits) or rng.random() < 0.01:  # some do not fit
                    codes[node, place] = 1 + source * LAYOUT.num_outputs + (int(fits[0]) if len(fits) else 1)
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
    return cells, codes, rng.permutation(results)


@settings(max_examples=300, deadline=None)
@given(count=st.integers(1, 24), seed=st.integers(0, 100_000), is_chain=st.booleans(), must_connect=st.booleans())
def test_as_in_python(count: int, seed: int, is_chain: bool, must_connect: bool):
    given_structure = structure(np.random.default_rng(seed), count, is_chain=is_chain)
    make = CompiledPlans(LAYOUT).make
    try:
        expected = reference.make_plan(LAYOUT, *given_structure, must_connect=must_connect)
    except InvalidInputError as error:
        with pytest.raises(InvalidInputError, match=re.escape(str(error))):
            make(*given_structure, must_connect=must_connect)
        return
    require_equal(make(*given_structure, must_connect=must_connect), expected)


def require_equal(got: Plan, expected: Plan) -> None:
    for name in ("nodes", "node_bases", "waiting", "subs", "sub_bases", "origin", "asked"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)
    for each in fields(Plan):
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
            plans.append(reference.make_plan(LAYOUT, *given_structure))
        except InvalidInputError as error:
            refused |= {word for word in ("cycle", "disconnected", "no result", "takes rows") if word in str(error)}
    assert len(plans) > 50
    assert refused == {"cycle", "disconnected", "no result", "takes rows"}
    assert any(plan.more for plan in plans)
    assert any(plan.sub_more for plan in plans)
    assert any(kind.carry for plan in plans for kind in plan.kinds)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise MissingDependencyError("no C++ compiler")

    monkeypatch.setattr(compiled, "_load", missing)
    assert planner.Planner(LAYOUT)._make.func is reference.make_plan
    assert Planner is planner.Planner

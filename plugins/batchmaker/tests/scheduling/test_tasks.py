"""A part of a task is the task that its rows alone would have been; brute force, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.tasks import Task


def made(lengths: list[int], *, equal: bool, num_inputs: int = 2) -> Task:
    """A task whose every number is another; ``equal``: no lengths."""
    size, steps = len(lengths), max(lengths)
    numbers = iter(range(10**6))

    def table(*shape: int) -> np.ndarray:
        return np.array([next(numbers) for _ in range(int(np.prod(shape)))], dtype=np.int64).reshape(shape)

    gives = [(step, row) for step in range(steps) for row in range(size) if step < lengths[row] and (step + row) % 3]
    return Task(
        cell=3,
        nodes=table(size),
        subs=table(size),
        fresh=np.arange(size),
        steps=steps,
        lengths=None if equal else np.array(lengths),
        in_rows=table(steps, size, num_inputs),
        carry=(1, -1),
        kept=(0, -1),
        homes=(table(size), table(steps, size)),
        out_rows=table(size, 1),
        is_stored=False,
        releases=True,
        result_steps=np.array([step for step, _ in gives], dtype=np.int64),
        result_rows=np.array([row for _, row in gives], dtype=np.int64),
        slots=table(len(gives)),
        address=77,
    )


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda each: sorted(each, reverse=True)),
    equal=st.booleans(),
    ends=st.tuples(st.integers(0, 5), st.integers(1, 6)),
)
def test_a_part_has_its_rows_and_their_results(lengths: list[int], equal: bool, ends: tuple[int, int]):
    if equal:
        lengths = [lengths[0]] * len(lengths)
    task = made(lengths, equal=equal)
    start = min(ends[0], len(lengths) - 1)
    rows = range(start, max(start + 1, min(ends[1], len(lengths))))
    part = task.part(rows)
    assert part.size == len(rows)
    assert part.num_cells == sum(lengths[row] for row in rows)
    assert part.steps == max(lengths[row] for row in rows)
    for own, row in enumerate(rows):
        assert (part.nodes[own], part.subs[own]) == (task.nodes[row], task.subs[row])
        assert part.out_rows[own].tolist() == task.out_rows[row].tolist()
        assert (part.lengths is None) == equal
        assert part.lengths is None or part.lengths[own] == lengths[row]
        assert part.in_rows[:, own].tolist() == task.in_rows[: part.steps, row].tolist()
    assert part.homes == (), "the whole task has run: its rows are here"
    results = zip(task.result_steps.tolist(), task.result_rows.tolist(), task.slots.tolist(), strict=True)
    expected = [(step, row, slot) for step, row, slot in results if row in rows]
    found = zip(part.result_steps.tolist(), part.result_rows.tolist(), part.slots.tolist(), strict=True)
    assert [(step, row + start, slot) for step, row, slot in found] == expected
    assert task.gives_to(rows).tolist() == [row in rows for row in task.result_rows.tolist()]
    assert (part.cell, part.carry, part.kept, part.is_stored, part.releases) == (3, (1, -1), (0, -1), False, True)
    assert part.fresh is None, "its subgraphs began with the whole task"
    assert part.address == 0, "compiled code knows the whole task alone"


@pytest.mark.parametrize("equal", [True, False])
def test_parts_in_halves_make_the_whole(equal: bool):
    task = made([4, 4, 2, 1] if not equal else [4] * 4, equal=equal)
    parts = [task.part(range(2)), task.part(range(2, 4))]
    assert sum(part.num_cells for part in parts) == task.num_cells == (16 if equal else 11)
    assert sorted(np.concatenate([part.slots for part in parts]).tolist()) == sorted(task.slots.tolist())
    again = parts[1].part(range(1, 2))
    assert again.nodes.tolist() == task.nodes[3:].tolist()

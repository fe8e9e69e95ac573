"""The CPU's memory plan against executions: operators begin and end in any order that dependencies allow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.layout import lay_out
from mlsys_nimble.operators import Concat, Pointwise, Slice, Step
from mlsys_nimble.program import Operator, Program, ValueId, ValueType, check_program
from mlsys_nimble.storage import Storage, ancestors, dependencies, plan_storage

ADD, RELU = Pointwise((Step("add", (0, 1)),)), Pointwise((Step("relu", (0,)),))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Sums, activations, slices (views) and concatenations (made in place) of rows."""
    values, operators = [ValueType((8,), "float32")], []
    for index in range(draw(st.integers(2, 9))):
        sources = draw(st.lists(st.integers(0, index), min_size=2, max_size=2))
        sizes = [values[source].numel for source in sources]
        choice = draw(st.sampled_from(["relu", "relu", "add", "slice", "concat"]))
        if choice == "add" and sizes[0] == sizes[1] and sources[0] != sources[1]:
            kind, size = ADD, sizes[0]
        elif choice == "slice" and sizes[0] >= 4:
            kind, size, sources = Slice(0, sizes[0] // 2), sizes[0] - sizes[0] // 2, sources[:1]
        elif choice == "concat" and sum(sizes) <= 64:
            kind, size = Concat(0), sum(sizes)
        else:
            kind, size, sources = RELU, sizes[0], sources[:1]
        values.append(ValueType((size,), "float32"))
        operators.append(Operator(f"op{index}", kind, tuple(sources), (index + 1,)))
    outputs = draw(st.lists(st.integers(1, len(values) - 1), min_size=1, max_size=2, unique=True))
    program = Program(tuple(values), tuple(operators), (0,), tuple(outputs))
    check_program(program)
    return program


def bytes_of(storage: Storage, program: Program, root: ValueId) -> range:
    return range(storage.offsets[root], storage.offsets[root] + program.values[root].nbytes)


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_no_execution_writes_what_is_still_to_be_read(program: Program, data: st.DataObject):
    layout = lay_out(program)
    needed = dependencies(layout)
    storage = plan_storage(layout, ancestors(needed))
    program, places = layout.program, layout.places
    todo = {index for index in range(len(program.operators)) if index not in layout.in_place}
    reads = {
        index: {places[value].root for value in program.operators[index].inputs} & set(storage.offsets)
        for index in todo
    }
    writes = {
        index: {places[value].root for value in program.operators[index].outputs} & set(storage.offsets)
        for index in todo
    }
    lasting = {places[value].root for value in program.kept()}
    waiting, running, done = set(todo), set[int](), set[int]()
    written: set[ValueId] = set()
    while waiting or running:
        ready = sorted(index for index in waiting if done.issuperset(needed[index]))
        act, index = data.draw(
            st.sampled_from([*(("begin", i) for i in ready), *(("end", i) for i in sorted(running))])
        )
        if act == "end":
            running.remove(index)
            done.add(index)
            continue
        waiting.remove(index)
        running.add(index)
        unread = {root for other in (*waiting, *running) for root in reads[other]} | lasting
        alive = (written & unread) | {root for other in running for root in writes[other]}
        for root in writes[index]:
            for other in alive - {root}:
                mine, theirs = bytes_of(storage, program, root), bytes_of(storage, program, other)
                assert not (mine and theirs and mine.start < theirs.stop and theirs.start < mine.stop), (root, other)
        written |= writes[index]

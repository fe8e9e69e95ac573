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


@settings(max_examples=150)
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


def chain(*kinds: object, outputs: tuple[ValueId, ...] | None = None, size: int = 64) -> Program:
    """One operator after another, each of the one before it."""
    values = (ValueType((size,), "float32"),) * (len(kinds) + 1)
    operators = tuple(Operator(f"op{i}", kind, (i,), (i + 1,)) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    return Program(values, operators, (0,), outputs or (len(kinds),))


def test_dependencies_look_through_what_runs_in_place():
    view, half = Slice(0, 0), ValueType((32,), "float32")
    full = ValueType((64,), "float32")
    operators = (
        Operator("first", RELU, (0,), (1,)),
        Operator("view", view, (1,), (2,)),
        Operator("second", RELU, (2,), (3,)),
        Operator("sum", ADD, (2, 3), (4,)),
    )
    layout = lay_out(Program((full, full, half, half, half), operators, (0,), (4,)))
    names = [operator.name for operator in layout.program.operators]
    needed = {name: [names[i] for i in some] for name, some in zip(names, dependencies(layout), strict=True)}
    assert needed == {
        "input0": [],
        "first": ["input0"],
        "view": [],
        "second": ["first"],
        "sum": ["first", "second"],
        "output0": ["sum"],
    }


def test_ancestors_are_all_that_must_have_run():
    assert ancestors([(), (0,), (0,), (1,), (1, 2), ()]) == [0b0, 0b1, 0b1, 0b11, 0b111, 0b0]


def test_a_chain_takes_two_places_in_turns():
    layout = lay_out(chain(*[RELU] * 6))
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert storage.plan.peak_nbytes == 2 * 64 * 4
    assert len(storage.offsets) == 7  # the input's copy, and what six operators make; the output is the caller's


def test_operators_side_by_side_have_places_of_their_own():
    values = (ValueType((64,), "float32"),) * 4
    operators = (
        Operator("one", RELU, (0,), (1,)),
        Operator("other", RELU, (0,), (2,)),
        Operator("sum", ADD, (1, 2), (3,)),
    )
    layout = lay_out(Program(values, operators, (0,), (3,)))
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert storage.plan.peak_nbytes == 3 * 64 * 4  # the input is still read while both are made
    in_turns = plan_storage(layout, [(1 << index) - 1 for index in range(len(layout.program.operators))])
    assert in_turns.plan.peak_nbytes == 3 * 64 * 4  # in turns, the sum goes where the input was


def test_what_goes_back_to_a_buffer_keeps_its_place():
    program = chain(*[RELU] * 4)
    kept = Program(program.values, program.operators, (0,), (4,), {}, ((0, 1),))
    layout = lay_out(kept)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    root = layout.places[layout.program.mutations[0][1]].root
    mine = bytes_of(storage, layout.program, root)
    others = [bytes_of(storage, layout.program, other) for other in storage.offsets if other != root]
    assert all(mine.stop <= other.start or other.stop <= mine.start for other in others)

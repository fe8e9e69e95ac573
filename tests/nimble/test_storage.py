"""The CPU's memory plan against executions: operators begin and end in any order that dependencies allow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.ir.operators import Concat, Pointwise, Slice, Step
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType, check_program
from mlsys_nimble.planning.layout import lay_out
from mlsys_nimble.planning.storage import Storage, ancestors, dependencies, plan_storage

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
        "first": [],
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
    assert len(storage.offsets) == 6  # what six operators make; input and output are the caller's


def test_operators_side_by_side_have_places_of_their_own():
    values = (ValueType((64,), "float32"),) * 4
    operators = (
        Operator("one", RELU, (0,), (1,)),
        Operator("other", RELU, (0,), (2,)),
        Operator("sum", ADD, (1, 2), (3,)),
    )
    layout = lay_out(Program(values, operators, (0,), (3,)))
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert storage.plan.peak_nbytes == 3 * 64 * 4  # both are read while the sum is made
    in_turns = plan_storage(layout, [(1 << index) - 1 for index in range(len(layout.program.operators))])
    assert in_turns.plan.peak_nbytes == 3 * 64 * 4


def test_a_buffers_new_value_shares_no_bytes():
    program = chain(*[RELU] * 4)
    kept = Program(program.values, program.operators, (0,), (4,), {}, ((0, 1),))
    layout = lay_out(kept)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    root = layout.places[layout.program.mutations[0][1]].root
    mine = bytes_of(storage, layout.program, root)
    others = [bytes_of(storage, layout.program, other) for other in storage.offsets if other != root]
    assert all(mine.stop <= other.start or other.stop <= mine.start for other in others)


def rows(*operators: tuple[str, object, tuple[ValueId, ...], ValueId], outputs: tuple[ValueId, ...]) -> Program:
    """Operators over rows of 64 floats; value 0 is the input."""
    made = tuple(Operator(name, kind, inputs, (output,)) for name, kind, inputs, output in operators)  # type: ignore[arg-type]
    return Program((ValueType((64,), "float32"),) * (len(made) + 1), made, (0,), outputs)


def share(storage: Storage, program: Program, one: ValueId, other: ValueId) -> bool:
    mine, theirs = bytes_of(storage, program, one), bytes_of(storage, program, other)
    return mine.start < theirs.stop and theirs.start < mine.stop


def test_bytes_are_shared_only_where_one_is_done_with_before_the_other_begins():
    """a -> b -> c, and beside them a -> d; all are summed. Between b and d there is no order, but b's reader is c."""
    program = rows(
        ("a", RELU, (0,), 1),
        ("b", RELU, (1,), 2),
        ("c", RELU, (2,), 3),
        ("d", RELU, (3,), 4),
        ("e", ADD, (1, 4), 5),
        outputs=(5,),
    )
    layout = lay_out(program)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    laid = layout.program
    pairs = {(i, j): share(storage, laid, i, j) for i in storage.offsets for j in storage.offsets if i < j}
    needed_at_once = {(1, 2), (1, 3), (1, 4), (2, 3), (3, 4), (1, 5), (4, 5)}
    assert not any(pairs[pair] for pair in needed_at_once if pair in pairs)
    assert storage.plan.peak_nbytes == 3 * 64 * 4, "a, and two in turns"
    assert set(storage.offsets) == {1, 2, 3, 4, 5}


def test_a_result_of_the_callers_and_constants_take_no_place():
    values = (ValueType((64,), "float32"),) * 3
    program = Program(values, (Operator("sum", ADD, (0, 1), (2,)),), (0,), (1, 2), {1: "a tensor"})
    layout = lay_out(program)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert not set(storage.offsets) & {0, 1, *layout.program.outputs}
    assert len(storage.offsets) == 1, "the sum"
    assert all(offset % 64 == 0 for offset in storage.offsets.values())


def test_a_value_that_is_read_by_a_branch_still_to_come_keeps_its_bytes():
    """The last reader of a in the list is not the last to run: without an order of its own it may come last."""
    program = rows(
        ("a", RELU, (0,), 1),
        ("slow", RELU, (1,), 2),
        ("b", RELU, (1,), 3),
        ("c", RELU, (3,), 4),
        ("d", RELU, (4,), 5),
        ("e", ADD, (2, 5), 6),
        outputs=(6,),
    )
    layout = lay_out(program)
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    laid = layout.program
    for later in (3, 4, 5):
        assert not share(storage, laid, 1, later), "slow may not have read it"
        assert not share(storage, laid, 2, later), "slow may be writing it"
    in_turns = plan_storage(layout, [(1 << index) - 1 for index in range(len(laid.operators))])
    assert in_turns.plan.peak_nbytes == 3 * 64 * 4
    assert storage.plan.peak_nbytes == 4 * 64 * 4, "a, slow, and two in turns"


def test_parts_of_a_concatenation_take_their_place_when_the_first_is_made():
    """The whole is written in parts, by operators at different times: it is taken from the first of them on."""
    values = tuple(ValueType((size,), "float32") for size in (64, 64, 64, 64, 128))
    operators = (
        Operator("first", RELU, (0,), (1,)),
        Operator("between", RELU, (1,), (2,)),
        Operator("last", RELU, (2,), (3,)),
        Operator("cat", Concat(0), (1, 3), (4,)),
    )
    layout = lay_out(Program(values, operators, (0,), (4,)))
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert layout.places[1].root == layout.places[3].root == 4
    assert not share(storage, layout.program, 2, 4), "between is made while the first part waits"
    assert 1 not in storage.offsets


def test_an_unread_value_is_not_overwritten_while_it_is_made():
    values = (ValueType((64,), "float32"),) * 3
    operators = (Operator("unread", RELU, (0,), (1,)), Operator("read", RELU, (0,), (2,)))
    layout = lay_out(Program(values, operators, (0,), (2,)))
    storage = plan_storage(layout, ancestors(dependencies(layout)))
    assert not share(storage, layout.program, 1, 2)

"""Release of memory, against an allocator that reuses blocks as torch's does, and against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.backends.cuda.captured import peak_nbytes, plan_releases
from mlsys_nimble.backends.cuda.plan import Run, happens_before, plan_streams
from mlsys_nimble.ir.operators import Copy, Reshape
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, dict[ValueId, ValueId]]:
    """A program of one value an operator, some of them views of another; value 0 is the input."""
    count = draw(st.integers(1, 12))
    operators: list[Operator] = []
    root: dict[ValueId, ValueId] = {0: 0}
    for index in range(count):
        value = index + 1
        sources = draw(st.lists(st.integers(0, index), min_size=1, max_size=3, unique=True))
        is_view = sources[0] != 0 and draw(st.integers(0, 4)) == 0
        root[value] = root[sources[0]] if is_view else value
        kind = Reshape() if is_view else Copy()
        operators.append(Operator(f"op{index}", kind, tuple(sources[:1] if is_view else sources), (value,)))
    types = tuple(ValueType((draw(st.integers(1, 4)) * 128,), "float32") for _ in range(count + 1))
    outputs = tuple(draw(st.lists(st.integers(1, count), min_size=1, max_size=3, unique=True)))
    return Program(types, tuple(operators), (0,), outputs), root


@settings(max_examples=200)
@given(programs(), st.booleans())
def test_nothing_is_given_back_while_another_stream_may_read_it(
    found: tuple[Program, dict[ValueId, ValueId]], multi: bool
):
    program, root = found
    plan = plan_streams(program.graph(), use_multi_stream=multi)
    held = {root[value] for value in program.outputs} | {0}
    released = plan_releases(program, plan, root, held)
    before = happens_before(plan, len(program.operators))
    stream_of = {command.operator: command.stream for command in plan.commands if isinstance(command, Run)}
    readers: dict[ValueId, set[int]] = {}
    for index, operator in enumerate(program.operators):
        for value in (*operator.inputs, *operator.outputs):
            readers.setdefault(root[value], set()).add(index)
    made_on = {root[v]: stream_of[i] for i, op in reversed(list(enumerate(program.operators))) for v in op.outputs}
    at = {value: index for index, values in enumerate(released.before) for value in values}
    for own, stream in made_on.items():
        if own in held:
            assert own not in at
            continue
        # Brute force: the first operator on its stream that every reader has surely run before.
        legal = [
            index
            for index in range(len(program.operators))
            if stream_of[index] == stream and all(before[index] >> reader & 1 for reader in readers[own])
        ]
        assert at.get(own) == (legal[0] if legal else None)
        assert (own in released.never) == (not legal)
    for value, index in at.items():  # views go with what they look at
        assert at[root[value]] == index


@given(programs())
def test_one_stream_reserves_what_program_order_needs(found: tuple[Program, dict[ValueId, ValueId]]):
    program, root = found
    plan = plan_streams(program.graph(), use_multi_stream=False)
    held = {root[value] for value in program.outputs} | {0}
    released = plan_releases(program, plan, root, held)
    peak, alive = 0, set()
    last = {root[v]: i for i, op in enumerate(program.operators) for v in (*op.inputs, *op.outputs)}
    for index, operator in enumerate(program.operators):
        alive -= {value for value in alive if last[value] < index and value not in held}
        alive |= {value for value in operator.outputs if root[value] == value}
        peak = max(peak, sum(-(-program.values[value].nbytes // 512) * 512 for value in alive))
    assert peak_nbytes(program, plan, released, root) == peak


def test_program_order_would_be_wrong():
    """b, on another stream, reads x; c, next on x's stream, may begin before b has: x must still be there."""
    size = ValueType((128,), "float32")
    steps = [("x", 0, 1), ("a", 1, 2), ("b", 1, 3), ("c", 2, 4), ("d", 4, 5)]
    operators = [Operator(name, Copy(), (source,), (value,)) for name, source, value in steps]
    operators.append(Operator("end", Copy(), (3, 5), (6,)))
    program = Program((size,) * 7, tuple(operators), (0,), (6,))
    plan = plan_streams(program.graph())
    root = {value: value for value in range(7)}
    released = plan_releases(program, plan, root, {0, 6})
    streams = [command.stream for command in plan.commands if isinstance(command, Run)]
    assert streams[0] == streams[1] == streams[3] != streams[2]
    assert 1 not in (*released.before[3], *released.before[4])
    assert 1 in (*released.before[5], *released.never)  # only what waits for b may take x's place
    assert 2 in released.before[4]  # a's result is read by c alone

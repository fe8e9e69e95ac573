"""The rewriter below the passes: who reads what, through replacements, insertions and substitutions."""

from __future__ import annotations

import torch
from mlsys_nimble.ir.operators import Aten, Copy, Input, Kind, Slice
from mlsys_nimble.ir.program import Operator, Program
from mlsys_nimble.passes.rewrite import Rewriter

from tests.nimble.passes.conftest import ADD, NEGATED, ROW, TWICE, program_of

# The rewriter.


def test_readers_are_counted_through_substitutions() -> None:
    """b = copy(a) and c = 2 b: with b gone, a has c for a reader beside d."""
    operators = (
        Operator("a", TWICE, (0,), (1,), "net.py:1"),
        Operator("b", Copy(), (1,), (2,), "net.py:2"),
        Operator("c", TWICE, (2,), (3,), "net.py:3"),
        Operator("d", NEGATED, (1,), (4,), "net.py:4"),
        Operator("e", ADD, (3, 4), (5,), "net.py:5"),
    )
    rewriter = Rewriter(program_of(*operators))
    assert rewriter.sole_producer(1) is None, "two readers"
    assert rewriter.sole_producer(2) == operators[1]
    rewriter.substitute(operators[1], 1)
    assert rewriter.sole_producer(1) is None, "c reads it now, and d"
    assert rewriter.producer(2) == operators[0]
    assert (rewriter.resolve(2), rewriter.at(1), rewriter.type(2)) == (1, None, ROW)
    d = rewriter.at(3)
    rewriter.substitute(d, 3)  # d's readers read c's result
    assert rewriter.sole_producer(1) == operators[0], "c alone"
    built = rewriter.build()
    assert [(operator.name, operator.inputs, operator.source) for operator in built.operators] == [
        ("a", (0,), "net.py:1"),
        ("c", (1,), "net.py:3"),
        ("e", (3, 3), "net.py:5"),
    ]


def test_a_copy_that_nobody_reads_leaves_no_reader_behind() -> None:
    operators = (
        Operator("a", TWICE, (0,), (1,)),
        Operator("unread", Copy(), (1,), (2,)),
        Operator("b", NEGATED, (1,), (3,)),
    )
    rewriter = Rewriter(program_of(*operators))
    rewriter.substitute(operators[1], 1)
    assert rewriter.sole_producer(1) == operators[0], "b alone"


def test_a_value_that_stands_for_a_result_is_a_result() -> None:
    operators = (Operator("a", TWICE, (0,), (1,)), Operator("b", Copy(), (1,), (2,)))
    rewriter = Rewriter(program_of(*operators))
    assert rewriter.sole_producer(1) == operators[0]
    rewriter.substitute(operators[1], 1)
    assert rewriter.sole_producer(1) is None, "the caller reads it too"
    assert rewriter.build().outputs == (1,)
    stored = Program((ROW,) * 3, operators, (0,), (1,), {}, ((0, 2),))
    rewriter = Rewriter(stored)
    rewriter.substitute(operators[1], 1)
    assert rewriter.build().mutations == ((0, 1),)


def test_readers_are_counted_through_insert_replace_and_drop() -> None:
    operators = (Operator("a", TWICE, (0,), (1,), "here"), Operator("b", NEGATED, (1,), (2,), "there"))
    rewriter = Rewriter(program_of(*operators))
    made = rewriter.insert(1, "new", TWICE, (1,), ROW)
    assert rewriter.producer(made) == Operator("new", TWICE, (1,), (made,), "there")
    assert rewriter.sole_producer(1) is None, "b and the new one"
    assert rewriter.sole_producer(made) is None, "nobody reads it yet"
    rewriter.replace(1, Operator("b", ADD, (made, made), (2,), "there"))
    assert rewriter.sole_producer(1) == operators[0]
    assert rewriter.sole_producer(made) is not None, "read by one operator, if twice"
    third = rewriter.add_constant(torch.zeros(4))
    assert rewriter.values[third] == ROW
    rewriter.replace(1, Operator("b", ADD, (0, third), (2,), "there"))
    rewriter.drop(rewriter.producer(made))
    rewriter.drop(operators[0])
    assert rewriter.at(0) is None
    built = rewriter.build()
    assert [operator.name for operator in built.operators] == ["b"]
    assert list(built.constants) == [third]


def test_inserted_operators_keep_their_order_before_the_old_one() -> None:
    rewriter = Rewriter(program_of(Operator("a", TWICE, (0,), (1,))))
    one = rewriter.insert(0, "one", TWICE, (0,), ROW)
    two = rewriter.insert(0, "two", TWICE, (one,), ROW)
    three = rewriter.insert(0, "three", TWICE, (two,), ROW)
    rewriter.replace(0, Operator("a", TWICE, (three,), (1,)))
    assert [operator.name for operator in rewriter.build().operators] == ["one", "two", "three", "a"]


def test_an_operator_inserted_at_the_visited_position_is_not_visited() -> None:
    operators = (Operator("a", TWICE, (0,), (1,)), Operator("b", NEGATED, (1,), (2,)))
    rewriter, seen = Rewriter(program_of(*operators)), []
    for position, operator in rewriter:
        seen.append(operator.name)
        if operator.name == "a":
            rewriter.insert(position, "before", TWICE, (0,), ROW)
            rewriter.insert(position + 1, "later", TWICE, (0,), ROW)
    assert seen == ["a", "later", "b"]


def test_an_operator_of_several_results_is_nobodys_sole_producer() -> None:
    sort = Aten("aten.sort.default", (Input(0),))
    operators = (Operator("sort", sort, (0,), (1, 2)), Operator("b", TWICE, (1,), (3,)))
    rewriter = Rewriter(program_of(*operators))
    assert rewriter.sole_producer(1) is None
    assert rewriter.producer(1) == rewriter.producer(2) == operators[0]
    assert rewriter.producer(0) is None, "an input"
    rewriter.replace(1, Operator("b", TWICE, (0,), (3,)))
    rewriter.drop(operators[0])
    assert [operator.name for operator in rewriter.build().operators] == ["b"]


def test_constants_that_a_call_changes_are_none() -> None:
    operators = (Operator("a", ADD, (1, 2), (3,)), Operator("copy", Copy(), (2,), (4,)))
    rewriter = Rewriter(Program((ROW,) * 5, operators, (0,), (3, 4), {1: torch.ones(4), 2: torch.ones(4)}, ((1, 3),)))
    assert rewriter.constant(1) is None
    assert torch.equal(rewriter.constant(2), torch.ones(4))
    assert rewriter.constant(0) is None


def test_memory_that_the_caller_may_see_is_traced_through_views_and_copies() -> None:
    view: Kind = Slice(0, 0)
    operators = (
        Operator("a", TWICE, (0,), (1,)),
        Operator("view", view, (1,), (2,)),
        Operator("copy", Copy(), (2,), (3,)),
        Operator("other", TWICE, (0,), (4,)),
        Operator("sum", ADD, (3, 4), (5,)),
    )
    assert Rewriter(program_of(*operators, outputs=(3, 5))).lasting == {1, 2, 3, 5}
    assert Rewriter(program_of(*operators, outputs=(5,))).lasting == {5}

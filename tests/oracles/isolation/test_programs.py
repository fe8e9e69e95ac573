"""A part of the oracle in ``make test``: programs that mix behind a bound, and such that do not."""

from __future__ import annotations

from hypothesis import given, settings

from tests.oracles.isolation.programs import Program, fault, programs


@settings(max_examples=20, deadline=None)
@given(programs())
def test_an_operator_that_mixes_behind_a_bound_is_named(program: Program):
    """Whatever bound hides it, and whatever steps stand around it; without one no operator is."""
    assert fault(program) is None

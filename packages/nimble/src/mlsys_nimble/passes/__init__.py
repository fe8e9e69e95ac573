"""Passes: pure functions from program to program. :func:`optimise` runs them in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlsys_nimble.ir.program import Program
from mlsys_nimble.passes.constants import fold_constants, remove_dead_code, share_subexpressions
from mlsys_nimble.passes.detection import find_attention, find_points
from mlsys_nimble.passes.folding import fold_affine, fold_borders
from mlsys_nimble.passes.fusion import fuse_elementwise, fuse_epilogues, fuse_messages, fuse_separables
from mlsys_nimble.passes.integers import find_integers, fuse_codes
from mlsys_nimble.passes.views import simplify_views

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (  # in order; a pass that others give new work appears twice
    find_integers,
    fold_constants,
    remove_dead_code,
    find_points,
    simplify_views,
    share_subexpressions,
    find_attention,
    fold_affine,
    fold_borders,
    fuse_epilogues,
    fuse_messages,
    fuse_codes,
    fuse_elementwise,
    fuse_epilogues,
    fuse_separables,
    simplify_views,
    remove_dead_code,
)


@dataclass(frozen=True, slots=True)
class PassReport:
    """Number of operators before and after one pass."""

    name: str
    num_operators_before: int
    num_operators_after: int

    def __str__(self) -> str:
        return f"{self.name}: {self.num_operators_before} -> {self.num_operators_after} operators"


def optimise(program: Program, passes: tuple[Pass, ...] = PASSES) -> tuple[Program, tuple[PassReport, ...]]:
    """Return the program after all passes, and a report of each in order."""
    reports = []
    for function in passes:
        after = function(program)
        reports.append(PassReport(function.__name__, len(program.operators), len(after.operators)))
        program = after
    return program, tuple(reports)

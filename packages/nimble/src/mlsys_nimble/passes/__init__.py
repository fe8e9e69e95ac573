"""Passes: pure functions from program to program. :func:`optimise` runs them in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlsys_nimble.ir.program import Program
from mlsys_nimble.passes.affine import fold_affine
from mlsys_nimble.passes.attention import find_attention
from mlsys_nimble.passes.borders import fold_borders
from mlsys_nimble.passes.constants import fold_constants
from mlsys_nimble.passes.dead_code import remove_dead_code
from mlsys_nimble.passes.elementwise import fuse_elementwise
from mlsys_nimble.passes.epilogues import fuse_epilogues
from mlsys_nimble.passes.separable import fuse_separables
from mlsys_nimble.passes.subexpressions import share_subexpressions
from mlsys_nimble.passes.views import simplify_views

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (  # in order; a pass that others give new work appears twice
    fold_constants,
    remove_dead_code,
    simplify_views,
    share_subexpressions,
    find_attention,
    fold_affine,
    fold_borders,
    fuse_epilogues,
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
        before = len(program.operators)
        program = function(program)
        reports.append(PassReport(function.__name__, before, len(program.operators)))
    return program, tuple(reports)

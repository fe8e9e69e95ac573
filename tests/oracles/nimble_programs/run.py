"""Draw programs and judge each along a path."""

from __future__ import annotations

import warnings

from hypothesis import HealthCheck, given, seed, settings

from tests.oracles.nimble_opinfo.cases import Case
from tests.oracles.nimble_opinfo.judge import Judgement, Tally, judge
from tests.oracles.nimble_programs.programs import Program, programs


def judged(program: Program, path: str, device: str = "cpu") -> Judgement:
    """The verdict; the case's name is the program as text."""
    return judge(Case(str(program), program, tuple(tensor.to(device) for tensor in program.tensors())), path)


def draw(path: str, count: int, *, number: int = 0, device: str = "cpu") -> Tally:
    """Judge ``count`` programs: the same ones for the same ``number``. All run, whatever is found."""
    tally = Tally(path)

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(owns_inputs="training" not in path))
    def run(program: Program) -> None:
        tally.add(judged(program, path, device))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return tally
